"""A phase that learns from a random part of its labels, and losses that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastrl.config.base import ConfigError, UserError
from fastrl.training.rollout_sources import build_sources
from tests.helpers.runs import begin_phase, tiny, tiny_context

pytestmark = pytest.mark.usefixtures("lively_rewards")

HALF = "phases.1.token_sampling={probability: 0.5}"
KL = "phases.1.losses={policy: {type: grpo, kl: {coefficient: 0.1}}, well: {type: positive_nll}}"


def _train(*overrides: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], list[int]]:
    """Weights and metrics of two steps, and the labels that the head computed in each."""
    config, context = tiny_context("phases.1.epochs=2", KL, *overrides)
    phase = begin_phase(config, 1, context)
    results = [phase.step().metrics for _ in range(2)]
    labels = [int(result["policy/tokens"]) for result in results]
    return context.model.module.state_dict(), results, labels


def test_about_half_of_the_labels_are_learned_the_same_ones_in_any_micro_batches() -> None:
    weights, metrics, labels = _train(HALF)
    _, _, all_labels = _train()
    for drawn, number in zip(labels, all_labels, strict=True):
        assert 0.3 * number < drawn < 0.7 * number
    small = "phases.1.max_tokens_per_micro_batch=40"
    same_weights, same_metrics, same_labels = _train(HALF, small)
    assert same_labels == labels
    for name, weight in weights.items():
        torch.testing.assert_close(same_weights[name], weight, rtol=0, atol=1e-10)
    for mine, theirs in zip(same_metrics, metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize(
    ("loss", "scope"),
    [("type: gspo", "document"), ("type: clip_cov", "batch")],
)
def test_losses_that_compare_tokens_are_refused_before_the_run(loss: str, scope: str) -> None:
    config, context = tiny_context(HALF, f"phases.1.losses={{policy: {{{loss}}}}}")
    with pytest.raises(UserError) as error:
        build_sources(config, context)
    expected = "`phases.1.token_sampling` must go with losses that are sums over single tokens"
    assert expected in str(error.value)
    assert f"compares the tokens of a {scope}" in str(error.value)


@pytest.mark.parametrize("probability", [0, 1])
def test_a_probability_without_effect_is_refused(probability: Any) -> None:
    with pytest.raises(ConfigError, match="probability"):
        tiny(f"phases.1.token_sampling={{probability: {probability}}}")
