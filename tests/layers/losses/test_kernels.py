"""Losses in fp32, where the head runs its Triton kernels (in the interpreter without a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import BatchKwargs, Document, kernels
from fastrl.layers.language_model_head import LanguageModelHead
from tests.helpers.loss_cases import BY_NAME, CASES
from tests.helpers.loss_documents import pack, policy_documents, preference_documents, with_weights
from tests.helpers.loss_heads import capped_head, close_to_policy, random_hidden

# Losses whose work is in the kernels; the others take passes of their own in PyTorch.
KERNEL_CASES = [case for case in CASES if not case.loss().needs - {"entropy"}]
ONE_PASS = [case for case in KERNEL_CASES if case.loss().scope in ("token", "document")]
TOGETHER = {
    "recompute": {c.name: c.config for c in KERNEL_CASES if not c.pairs},
    "single_pass": {c.name: c.config for c in ONE_PASS},
}


def in_dtype(batch: BatchKwargs, dtype: torch.dtype, device: torch.device | str) -> BatchKwargs:
    names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    return batch.replace(**{n: getattr(batch, n).to(dtype) for n in names}).to(device)


def gradients(head: LanguageModelHead, hidden: Tensor, batch: BatchKwargs) -> list[Tensor]:
    output = head(hidden, batch)
    upstream = torch.tensor(-1.7, dtype=output.loss.dtype, device=output.loss.device)
    grads = torch.autograd.grad(output.loss, [hidden, *head.parameters()], upstream)
    return [output.loss.detach(), *grads]


def assert_as_in_float64(
    losses: dict[str, Any], documents: list[Document], strategy: str, device: torch.device
) -> None:
    exact = capped_head(losses, strategy=strategy)
    batch = pack(documents)
    hidden = random_hidden(batch)
    # Both start from the same fp32 numbers, so that no token is clipped in one of them alone.
    narrow_batch = in_dtype(close_to_policy(exact, hidden, batch), torch.float32, device)
    narrow = capped_head(losses, strategy=strategy).float().to(device)
    with torch.no_grad():
        for parameter, source in zip(exact.parameters(), narrow.parameters(), strict=True):
            parameter.copy_(source)
    narrow_hidden = hidden.float().to(device).requires_grad_()
    assert kernels.can_run(narrow_hidden)
    actual = gradients(narrow, narrow_hidden, narrow_batch)
    wide_hidden = narrow_hidden.detach().double().cpu().requires_grad_()
    expected = gradients(exact, wide_hidden, in_dtype(narrow_batch, torch.float64, "cpu"))
    for got, wanted in zip(actual, expected, strict=True):
        assert (got.double().cpu() - wanted).norm() < 2e-5 * wanted.norm()


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter


@pytest.fixture(autouse=True)
def _run_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "run_on_cpu", True)


# One of each set of statistics that gradients come in for.
@pytest.mark.parametrize("name", ["grpo", "gspo", "z_loss", "gspo_bonus"])
def test_a_loss_through_the_kernels(name: str, device: torch.device) -> None:
    losses = {"policy": dict(BY_NAME[name].config)}
    assert_as_in_float64(losses, policy_documents(), "auto", device)


def test_pairs_through_the_kernels(device: torch.device) -> None:
    losses = {"preference": dict(BY_NAME["dpo"].config)}
    assert_as_in_float64(losses, preference_documents(), "recompute", device)


@pytest.mark.parametrize("strategy", TOGETHER)
def test_all_losses_in_one_pass_through_the_kernels(strategy: str, device: torch.device) -> None:
    losses = {
        name: dict(config) | {"weight": 1 / (number + 2)}
        for number, (name, config) in enumerate(TOGETHER[strategy].items())
    }
    assert_as_in_float64(losses, with_weights(policy_documents()), strategy, device)
