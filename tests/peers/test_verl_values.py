"""Value loss and advantages from values: against verl's own functions on the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import Document, TokenBatch, ValueHead
from fastrl.config import ValueLossConfig
from fastrl.data.value_advantages import with_value_advantages
from tests.helpers.peer_packages import peer_module

core_algos = peer_module("verl.trainer.ppo.core_algos")

# Completion masks: whole rows, a hole as of a tool's answer, one token.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
)
REWARDS = [1.5, -2.0, 0.7, 0.0]
NORMALISATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"normalisation": "tokens"},
    "seq-mean-token-mean": {"normalisation": "documents"},
    "seq-mean-token-sum-norm": {"normalisation": "constant", "length": MASK.shape[1]},
}


def rows(values: Tensor, returns: Tensor | None = None) -> list[Document]:
    """A document a row, after a prompt of one token."""
    prompt = torch.zeros(1)
    return [
        Document(
            [1] * (1 + MASK.shape[1]),
            loss_mask=[False, *MASK[number].bool().tolist()],
            reward=reward,
            values=torch.cat([prompt, values[number]]),
            returns=None if returns is None else torch.cat([prompt, returns[number]]),
        )
        for number, reward in enumerate(REWARDS)
    ]


@pytest.mark.parametrize("mode", NORMALISATIONS)
def test_the_value_loss_is_verls(mode: str) -> None:
    shape = MASK.shape
    old, returns = torch.randn(2, *shape, dtype=torch.float64)
    hidden = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    head = ValueHead(5, ValueLossConfig(epsilon=0.3, **NORMALISATIONS[mode]), dtype=torch.float64)
    with torch.no_grad():
        head.weight.normal_()
    (batch,) = TokenBatch.from_documents(rows(values=old, returns=returns)).to_kwargs()
    last = torch.zeros(shape[0], 1, 5, dtype=torch.float64)
    output = head(torch.cat([hidden, last], 1), batch)  # the last slot of a row has no label
    values = (hidden @ head.weight[0]).squeeze(-1)
    expected, clip_fraction = core_algos.compute_value_loss(
        values, returns, old, MASK, 0.3, loss_agg_mode=mode
    )
    inputs = [hidden, head.weight]
    # verl divides by the number of tokens plus 1e-8, and takes its fraction in fp32.
    torch.testing.assert_close(output.loss, expected, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(
        torch.autograd.grad(output.loss, inputs),
        torch.autograd.grad(expected, inputs),
        atol=1e-7,
        rtol=1e-7,
    )
    found = output.metrics["value/clip_fraction"]
    torch.testing.assert_close(found.float(), clip_fraction.float())


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0)])
def test_advantages_and_returns_are_verls(gamma: float, lam: float) -> None:
    values = torch.randn(*MASK.shape, dtype=torch.float64)
    rewards = torch.zeros(*MASK.shape, dtype=torch.float64)
    for row, (mask, reward) in enumerate(zip(MASK, REWARDS, strict=True)):
        rewards[row, int(mask.nonzero().max())] = reward
    advantages, returns = core_algos.compute_gae_advantage_return(
        rewards, values, MASK, torch.tensor(gamma), torch.tensor(lam, dtype=torch.float64)
    )
    made = with_value_advantages(rows(values=values), gamma=gamma, lam=lam, whiten=True)
    columns = TokenBatch.from_documents(made).columns
    learned = MASK.bool()
    for name, theirs in (("advantages", advantages), ("returns", returns)):
        ours = columns[name].view(len(REWARDS), -1)[:, :-1]
        torch.testing.assert_close(ours[learned], theirs[learned], atol=1e-7, rtol=1e-7)
