"""What a model cannot be built or run with is one message before the run (tests/properties)."""

from __future__ import annotations

import pytest

from fastrl.config import UserError
from tests.helpers.runs import tiny_context


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.padded_vocab_size=14"],
            "`model`: `padded_vocab_size` must be at least the vocabulary size 15, got 14",
        ),
        (
            ["model.attention_implementation=flex", "device=cpu"],
            "`model.attention_implementation: flex` needs a CUDA device, got cpu; or use `auto`",
        ),
        (
            ["model.attention_implementation=varlen", "device=cpu"],
            "`model.attention_implementation: varlen` needs a CUDA device, got cpu; or use",
        ),
    ],
)
def test_what_a_model_cannot_have_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_context(*overrides)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.attention_implementation=varlen"], "needs 16-bit activations, got float64"),
        (["model.attention_implementation=flex"], "has no float64"),
    ],
)
def test_what_attention_lacks_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_context(*overrides, "device=cuda")
