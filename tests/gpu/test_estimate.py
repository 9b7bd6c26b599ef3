"""What is estimated is what a GPU holds: the head alone, and training steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.memory import measure_head, measure_step
from benchmarks.memory_cases import HEADS, STEPS
from fastrl.estimate.head import total

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU, which is what is estimated")
    torch.cuda.set_device(0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    # A compiled attention for every dtype, size and mask of the cases.
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", HEADS)
def test_the_head(name: str) -> None:
    case = HEADS[name]
    measured = measure_head(case)
    assert total(case.estimate()[1]) == pytest.approx(measured["measured"], rel=0.05), measured


@pytest.mark.parametrize(
    "name", ["1B, fp32", "1B, bf16, checkpoints", "1B, bf16, pieces", "0.6B, fp32, recompute"]
)
def test_a_step(name: str) -> None:
    case = STEPS[name]
    case = replace(case, model=case.model.model_copy(update={"num_hidden_layers": 6}))
    measured = measure_step(case)
    assert total(case.estimate()[1]) == pytest.approx(measured["measured"], rel=0.05), measured
