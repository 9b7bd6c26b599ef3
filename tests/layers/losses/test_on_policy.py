"""`on_policy`: a pass that is its own old policy equals one after a pass for `old_logprobs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import BatchKwargs, LanguageModelHead
from fastrl.layers.language_model_head import HeadOutput
from fastrl.layers.losses import LanguageModelPolicyGradientLoss, finish_metrics
from tests.helpers.loss_cases import BOTH_POLICIES, LossCase
from tests.helpers.loss_documents import pack, policy_documents, with_weights
from tests.helpers.loss_heads import capped_head, close_to_policy, random_hidden

TOLERANCE = 1e-12
OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"strategy": "recompute"},
    # Rows of zero advantage are not computed at all.
    "recompute without metrics": {"strategy": "recompute", "metrics": False},
    "single_pass": {"strategy": "single_pass", "chunk_size": 12},
    "keep": {"keep": {"top_k": 9}},
}


def inputs(head: LanguageModelHead) -> tuple[BatchKwargs, Tensor]:
    """A batch whose reference and sampler are near the head's policy, and hidden states."""
    batch = pack(with_weights(policy_documents())).replace(temperature=0.8)
    hidden = random_hidden(batch)
    return close_to_policy(head, hidden, batch), hidden.requires_grad_()


def first_pass(head: LanguageModelHead, hidden: Tensor, batch: BatchKwargs) -> Tensor:
    """The log-probabilities of a pass of its own."""
    head.eval()
    with torch.no_grad():
        logprobs: Tensor = head(hidden, batch.replace(old_logprobs=None)).logprobs
    head.train()
    return logprobs


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def gradients(head: LanguageModelHead, hidden: Tensor, output: HeadOutput) -> list[Tensor]:
    assert output.loss is not None
    upstream = torch.tensor(-1.7, dtype=torch.float64)
    return list(torch.autograd.grad(output.loss, [hidden, *head.parameters()], upstream))


def head_of(config: Mapping[str, Any], options: Mapping[str, Any]) -> LanguageModelHead:
    return capped_head({"policy": dict(config)}, **options)


PASSES = [
    pytest.param(cases, options, id=f"{cases[0].name}-{name}")
    for cases in BOTH_POLICIES
    for name, options in OPTIONS.items()
    # An entropy quantile has no single pass.
    if name != "single_pass" or cases[0].loss().scope != "batch"
]


@pytest.mark.parametrize(("cases", "options"), PASSES)
def test_one_pass_equals_two(cases: tuple[LossCase, LossCase], options: dict[str, Any]) -> None:
    after_another, alone = (head_of(case.config, options) for case in cases)
    batch, hidden = inputs(after_another)
    old = first_pass(after_another, hidden, batch)
    expected = after_another(hidden, batch.replace(old_logprobs=old))
    expected_grads = gradients(after_another, hidden, expected)
    assert any(grad.count_nonzero() for grad in expected_grads)
    # Without the column, and with one that means something else.
    for column in (None, torch.full_like(old, torch.nan)):
        actual = alone(hidden, batch.replace(old_logprobs=column))
        assert_equal(actual.loss, expected.loss)
        assert_equal(actual.metrics, expected.metrics)
        assert actual.strategy == expected.strategy
        assert_equal(gradients(alone, hidden, actual), expected_grads)


@pytest.mark.parametrize("level", ["token", "document", "document_token"])
def test_the_ratio_is_1_and_has_a_gradient(level: str) -> None:
    """Also of logits at another scale than those of the head's own log-probabilities."""
    head = head_of({"type": "sapo", "on_policy": True, "ratio_level": level}, {})
    scaled = {"type": "sapo", "on_policy": True, "ratio_level": level, "logits_scale": 2.0}
    for each in (head, head_of(scaled, {})):
        batch, hidden = inputs(each)
        output = each(hidden, batch.replace(old_logprobs=None))
        metrics = finish_metrics(output.metrics)
        assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1
        assert metrics["policy/ratio_ess"] == pytest.approx(1, abs=1e-15)
        assert metrics["policy/kl_old_new"] == 0
        assert metrics["policy/old_logprob"] == metrics["policy/logprob"]
        assert gradients(each, hidden, output)[0].count_nonzero()


def test_the_correction_is_of_the_policy_to_the_sampler() -> None:
    correction = {"level": "token", "mode": "truncate", "high": None}
    config = {"type": "grpo", "on_policy": True, "rollout_correction": correction}
    head = head_of(config, {})
    batch, hidden = inputs(head)
    output = head(hidden, batch.replace(old_logprobs=None), return_logprobs=True)
    mask = batch.labels != -100
    weights = (output.logprobs - batch.rollout_logprobs).exp()[mask]
    metrics = finish_metrics(output.metrics)
    for name in ("weight", "rollout_weight"):
        assert_equal(metrics[f"policy/{name}"], weights.mean())
    assert batch.advantages is not None
    expected = -(weights * batch.advantages[mask]).mean()
    assert_equal(output.loss, expected)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_the_first_of_several_updates_gives_the_others_their_old_policy(kind: str) -> None:
    """One loss throughout: on policy first, then with the log-probabilities of that pass."""
    reference = head_of({"type": kind}, {})
    batch, hidden = inputs(reference)
    old = first_pass(reference, hidden, batch)
    head = head_of({"type": kind}, {})
    loss = head.losses["policy"]
    assert isinstance(loss, LanguageModelPolicyGradientLoss)
    loss.on_policy = True
    first = head(hidden, batch.replace(old_logprobs=None), return_logprobs=True)
    loss.on_policy = False
    with torch.no_grad():
        for each in (head, reference):
            each.weight.mul_(1.1)
    second = head(hidden, batch.replace(old_logprobs=first.logprobs))
    expected = reference(hidden, batch.replace(old_logprobs=old))
    assert_equal(second.loss, expected.loss)
    assert second.metrics["policy/ratio_max"] != 1
    with pytest.raises(ValueError, match="`old_logprobs` must be in the batch"):
        head(hidden, batch.replace(old_logprobs=None))
