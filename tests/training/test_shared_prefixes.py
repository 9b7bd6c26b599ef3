"""A phase whose documents share prefixes is the phase without; where it cannot be, it says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fastrl import TokenBatch
from fastrl.config.base import ConfigError
from tests.helpers.runs import begin_phase, tiny, tiny_context

pytestmark = pytest.mark.usefixtures("lively_rewards")

SHARES = "phases.1.share_prefixes=true"


def _train(
    monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> tuple[dict[str, torch.Tensor], list[Mapping[str, Any]], list[int]]:
    """Weights and metrics of two steps, and the slots of each batch."""
    sizes = []
    from_documents = TokenBatch.from_documents

    def recorded(*args: Any, **kwargs: Any) -> TokenBatch:
        batch = from_documents(*args, **kwargs)
        sizes.append(batch.num_tokens)
        return batch

    config, context = tiny_context("phases.1.epochs=2", *overrides)
    phase = begin_phase(config, 1, context)
    with monkeypatch.context() as patch:
        patch.setattr(TokenBatch, "from_documents", recorded)
        results = [phase.step() for _ in range(2)]
    return context.model.module.state_dict(), [result.metrics for result in results], sizes


@pytest.mark.parametrize("max_tokens", [40, 10000])
def test_the_weights_are_those_without(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = f"phases.1.max_tokens_per_micro_batch={max_tokens}"
    kl = "phases.1.losses={policy: {type: grpo, kl: {coefficient: 0.1}}}"
    weights, metrics, sizes = _train(monkeypatch, bound, kl)
    shared_weights, shared_metrics, shared_sizes = _train(monkeypatch, bound, kl, SHARES)
    assert sum(shared_sizes) < 0.8 * sum(sizes)
    assert max(shared_sizes) <= max_tokens
    for name, weight in weights.items():
        torch.testing.assert_close(shared_weights[name], weight, rtol=0, atol=1e-10)
    for mine, theirs in zip(shared_metrics, metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "parallel.sequence_data=2",
            "`phases.1.share_prefixes` must go with `parallel.sequence_data: 1`, got 2: of a",
        ),
        (
            "parallel.micro_sequences=3",
            "`phases.1.share_prefixes` must go with `parallel.micro_sequences: 1`, got 3: of a",
        ),
        ("phases.0.share_prefixes=true", "`share_prefixes` in `phases.0` (type `supervised`)"),
    ],
)
def test_what_cannot_share_is_refused_before_the_run(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny(SHARES, override)
    assert expected in str(error.value)
