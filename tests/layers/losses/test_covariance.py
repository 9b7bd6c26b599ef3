"""Which tokens have the largest covariance where rounding could decide."""

from __future__ import annotations

import pytest
import torch

from fastrl import BatchKwargs, TokenStatistics
from fastrl.config import KLCovLossConfig
from fastrl.layers.losses import build_loss


@pytest.mark.parametrize("seed", range(20))
def test_two_labels_have_one_covariance(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, advantages = -torch.rand(2, 2, generator=generator)
    slots = torch.arange(2)
    batch = BatchKwargs(
        tokens=slots,
        positions=slots,
        labels=slots,
        document_index=torch.zeros(2, dtype=torch.int64),
        label_counts=torch.full((2,), 2.0),
        num_documents=1,
        num_labels_in_batch=2,
        num_documents_in_batch=1,
        advantages=advantages,
        old_logprobs=logprobs - 0.5,
    )
    values = []
    for coefficient in (1.0, 2.0):
        loss = build_loss(KLCovLossConfig(fraction=0.5, coefficient=coefficient))
        values.append(loss(TokenStatistics(logprobs, None, logprobs), batch))
    is_positive = (logprobs[0] - logprobs[1]) * (advantages[0] - advantages[1]) > 0
    # The penalty of 0.5 nats on both tokens, or on none.
    assert float(values[1] - values[0]) == pytest.approx(0.5 if is_positive else 0.0, abs=1e-6)
