"""Statistics to the bit on a GPU: the fused kernels, and those of rows, whatever the layout."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fastrl import linear_logprobs
from tests.helpers.bf16_heads import BF16, grpo_batch, grpo_head
from tests.helpers.bit_layouts import Hashes, Layout, Problem, check_gradients, statistics_of

pytestmark = pytest.mark.gpu


def problem(dtype: torch.dtype, **sizes: Any) -> Problem:
    defaults = {"num_documents": 8, "length": 90, "hidden_size": 136, "vocab_size": 5000}
    return Problem.draw(**(defaults | sizes), dtype=dtype, device="cuda")


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_statistics_do_not_depend_on_the_layout(dtype: torch.dtype, softcap: float | None) -> None:
    case, draws, hashes = problem(dtype, softcap=softcap), random.Random(3), Hashes()
    layouts = [Layout.draw(case, draws) for _ in range(30)]
    different = [layout for layout in layouts if not hashes.add(statistics_of(case, layout))]
    assert different == []


def test_more_leaves_than_are_merged_at_a_time() -> None:
    case, draws, hashes = problem(BF16, vocab_size=150_000), random.Random(3), Hashes()
    assert all(hashes.add(statistics_of(case, Layout.draw(case, draws))) for _ in range(10))


def test_without_the_key_strategies_differ() -> None:
    case, draws, hashes = problem(BF16), random.Random(3), Hashes()
    for _ in range(10):
        hashes.add(statistics_of(case, Layout.draw(case, draws), deterministic=False))
    assert len(hashes.found) > 1


@pytest.mark.parametrize("strategy", ["single_pass", "recompute"])
def test_gradients_twice_and_beside_other_rows(strategy: str) -> None:
    batch = grpo_batch(6, 90, 5000)
    losses = {"policy": {"type": "reinforce"}}  # which clips no document
    head = grpo_head(256, 5000, strategy=strategy, deterministic=True, losses=losses)
    check_gradients(head, torch.randn(batch.num_tokens, 256, device="cuda", dtype=BF16), batch)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_number_as_temperature_is_one_a_row(dtype: torch.dtype) -> None:
    hidden = torch.randn(70, 128, device="cuda", dtype=dtype)
    weight = torch.randn(3000, 128, device="cuda", dtype=dtype)
    labels = torch.randint(3000, (70,), device="cuda")
    found = [
        linear_logprobs(hidden, weight, labels, temperature=t, entropy=True, deterministic=True)
        for t in (0.7, torch.full((70,), 0.7, device="cuda"))
    ]
    for one, other in zip(*(each.vectors() for each in found), strict=True):
        assert torch.equal(one, other)
