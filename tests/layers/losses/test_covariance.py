"""Which tokens have the largest covariance where rounding could decide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastrl import BatchKwargs, TokenStatistics
from fastrl.config import KLCovLossConfig
from fastrl.layers.losses import build_loss


@pytest.mark.parametrize("seed", range(20))
def test_two_labels_have_one_covariance(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, advantages = -torch.rand(2, 2, generator=generator)
    is_positive = (logprobs[0] - logprobs[1]) * (advantages[0] - advantages[1]) > 0
    # The penalty of 0.5 nats on both tokens, or on none.
    expected = 0.5 if is_positive else 0.0
    assert penalty(logprobs, advantages) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("advantage", [-0.6039143345239606, 0.1, 1 / 3])
@pytest.mark.parametrize("length", [3, 10, 49])
def test_equal_advantages_have_no_covariance(advantage: float, length: int) -> None:
    logprobs = -torch.rand(length, generator=torch.Generator().manual_seed(length)).double()
    assert penalty(logprobs, torch.full((length,), advantage, dtype=torch.float64)) == 0


def penalty(logprobs: Tensor, advantages: Tensor) -> float:
    """What the penalty of 0.5 nats at half of the tokens adds to the loss."""
    slots = torch.arange(len(logprobs))
    batch = BatchKwargs(
        tokens=slots,
        positions=slots,
        labels=slots,
        document_index=torch.zeros_like(slots),
        label_counts=torch.full(slots.shape, float(len(slots))),
        num_documents=1,
        num_labels_in_batch=len(slots),
        num_documents_in_batch=1,
        advantages=advantages,
        old_logprobs=logprobs - 0.5,
    )
    values = []
    for coefficient in (1.0, 2.0):
        loss = build_loss(KLCovLossConfig(fraction=0.5, coefficient=coefficient))
        values.append(loss(TokenStatistics(logprobs, None, logprobs), batch))
    return float(values[1] - values[0])
