"""The operations that a step is said to need are those that it makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory_cases import StepCase, llama
from fastrl import Document, Llama, TokenBatch
from fastrl.config.training import ParallelConfig
from fastrl.estimate.arithmetic import Arithmetic, arithmetic_line
from fastrl.estimate.memory import Step
from fastrl.estimate.sizes import Shapes
from fastrl.models.flops import TrainingFlops

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = 40


def step_of(**options: Any) -> Step:
    case = StepCase(llama(SIZES, **options), TOKENS)
    shapes = Shapes.of(ParallelConfig(), TOKENS, "float32")
    return Step(case.model, case.parallel, shapes, case.model.head.losses)


def operations(total: list[int], a: list[int], b: list[int], **_: Any) -> int:
    """Of total += a b, which torch does not count."""
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize("strategy", ["single_pass", "recompute"])
@pytest.mark.parametrize("checkpointing", ["none", "attention", "full"])
def test_they_are_what_a_step_makes(strategy: str, checkpointing: str) -> None:
    step = step_of(strategy=strategy)
    model = step.model.model_copy(update={"activation_checkpointing": checkpointing})
    step = replace(step, model=model)
    document = Document(
        tokens=list(range(TOKENS + 1)), loss_mask=[1] * (TOKENS + 1),
        logprobs=[-1.0] * (TOKENS + 1), advantage=1.0,
    )  # fmt: skip
    (batch,) = TokenBatch.from_documents([document]).to_kwargs()
    batch = batch.span(0, TOKENS)
    in_place = {torch.ops.aten.addmm_: operations}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counted:
        output = Llama(model)(batch)
        assert output.loss is not None
        output.loss.backward()
    found = Arithmetic.of(step)
    # Attention apart, which the counter has for all pairs of tokens and only on some backends.
    counts = counted.get_flop_counts()["Global"]
    products = sum(
        number for operator, number in counts.items() if "attention" not in str(operator)
    )
    attention = TrainingFlops.of(model).attention * TOKENS**2
    said = found.needed + found.recomputed - attention * (4 / 3 if checkpointing == "full" else 1)
    assert products == pytest.approx(said, rel=0.001), counts


def test_the_line_names_the_speed_at_the_peak() -> None:
    step = step_of()
    found = Arithmetic.of(step)
    speed = found.tokens_per_second(TOKENS, 1)
    assert speed == pytest.approx(989e12 * TOKENS / found.needed)
    assert f"{speed:,.0f} tokens/s" in arithmetic_line(step)
