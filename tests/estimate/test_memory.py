"""The estimate is what the code allocates, and the code allocates what a GPU was seen to hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

from benchmarks.cases import SHAPES, make_batch
from benchmarks.memory_cases import (
    STEPS,
    HeadCase,
    StepCase,
    head_step,
    llama,
    meta_llama,
    new_mesh,
    step_batches,
    updates,
)
from benchmarks.ours import GRPO, GSPO
from benchmarks.table import RESULTS
from fastrl.config.training import ParallelConfig
from fastrl.estimate import memory
from fastrl.estimate.head import total
from tests.helpers.hopper_memory import LiveBytes, fake_batch, hopper

pytestmark = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.13"),
    reason="counts what the fake tensors of torch 2.13 allocate; older ones allocate otherwise",
)

# Of the allocations that Hopper's kernels make and the code does not show.
UNSEEN = memory.WORKSPACE_BYTES


def peak_of(live: LiveBytes, step: Callable[[], object]) -> int:
    """Most bytes above those before the step."""
    live.reset_peak()
    before = live.live
    result = step()
    del result
    return live.peak - before


def head_peak(case: HeadCase) -> tuple[int, str]:
    batch = make_batch(SHAPES[case.shape])
    with hopper() as mode, LiveBytes() as live:
        step = head_step(case, fake_batch(mode, batch), "cpu")
        return peak_of(live, step), live.table()


def step_peak(case: StepCase) -> tuple[int, str]:
    with fake_mesh(case.parallel) as mesh:
        model = meta_llama(case, mesh)
        pieces, whole = step_batches(case, model.groups)
        with hopper() as mode, LiveBytes() as live:
            pieces, whole = (
                tuple(fake_batch(mode, piece) for piece in pieces),
                fake_batch(mode, whole),
            )
            before = live.live
            update = updates(case, model.to_empty(device="cpu"), pieces, whole)
            update()
            resident = live.live - before
            return resident + peak_of(live, update), live.table()


@contextmanager
def fake_mesh(parallel: ParallelConfig) -> Iterator[DeviceMesh | None]:
    """A mesh of which this process is rank 0, and whose collectives do nothing."""
    if parallel.num_processes == 1 and not parallel.fully_sharded:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=parallel.num_processes)
    try:
        yield new_mesh(parallel, "cpu")
    finally:
        dist.destroy_process_group()


def recorded_heads() -> list[Any]:
    """Rows of published results: the head's peak on a GPU."""
    rows = [
        row
        for name in ("llama3-8b", "qwen3-1.7b", "lengths")
        for row in json.loads((RESULTS / f"{name}.json").read_text())
    ]
    unique = {
        (row["shape_name"], row["strategy"], row["loss"], "metrics" in row["implementation"]): row
        for row in rows
        if row["implementation"].startswith("fastrl") and row["passes"] == "fwdbwd"
    }
    return [pytest.param(row, id="-".join(map(str, key))) for key, row in unique.items()]


@pytest.mark.parametrize("row", recorded_heads())
def test_the_head_is_estimated_as_it_was_measured(row: dict[str, Any]) -> None:
    loss = GSPO if row["loss"] == "gspo" else GRPO
    metrics = "metrics" in row["implementation"]
    case = HeadCase(row["shape_name"], row["strategy"], loss, metrics)
    measured = row["peak_bytes_over_inputs"]
    allocated, table = head_peak(case)
    # The stand-in for a GPU is one.
    assert allocated == pytest.approx(measured, rel=0.005), table
    assert total(case.estimate()[1]) == pytest.approx(measured, rel=0.01), table


SMALL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def small(parallel: dict[str, Any], tokens: int, micro_batches: int = 1, **options: Any) -> Any:
    return StepCase(
        llama(SMALL, **options), tokens, ParallelConfig.model_validate(parallel), micro_batches
    )


SHARDED: dict[str, Any] = {"fully_sharded": True, "compute_dtype": "bfloat16"}
SPLIT: dict[str, Any] = {"tensor": 4, "sequence_parallel": True}
CASES: dict[str, StepCase] = {
    **{
        name: replace(case, model=case.model.model_copy(update={"num_hidden_layers": 3}))
        for name, case in STEPS.items()
        if name in ("1B, bf16", "1B, bf16, checkpoints, two micro-batches", "0.6B, fp32, recompute")
    },
    "few tokens": small({}, 512),
    "few tokens, two micro-batches": small({}, 512, 2),
    "chunks": small({}, 16384, chunk_size=1024),
    "normed queries and keys": StepCase(
        llama(SMALL | {"architecture": "qwen3", "num_key_value_heads": 16}), 16384
    ),
    "pieces, checkpoints": small({"micro_sequences": 4}, 32768, checkpointing=True),
    "8 ranks, sharded, checkpoints": small({"data": 8, **SHARDED}, 8192, 2, checkpointing=True),
    "gathered once a micro-batch": small(
        {"data": 8, **SHARDED, "reshard_after": "backward"}, 8192, 2
    ),
    "gathered once a micro-batch, pieces": small(
        {"data": 4, **SHARDED, "micro_sequences": 4, "reshard_after": "backward"}, 32768
    ),
    "gathered once an update": small({"data": 8, **SHARDED, "reshard_after": "update"}, 8192, 2),
    "gathered once an update, checkpoints, one rank": small(
        {**SHARDED, "reshard_after": "update"}, 16384, 2, checkpointing=True
    ),
    "gathered once an update, pieces": small(
        {"data": 4, **SHARDED, "micro_sequences": 4, "reshard_after": "update"}, 32768, 2
    ),
    "sequence data, sharded": small({"sequence_data": 4, **SHARDED}, 65536),
    "attention kept": small({}, 16384, checkpointing="attention"),
    "attention kept, sharded": small({"data": 8, **SHARDED}, 8192, 2, checkpointing="attention"),
    "attention kept, all axes": small(
        {"tensor": 2, "sequence_parallel": True, "sequence_data": 2, "data": 2, **SHARDED},
        65536,
        checkpointing="attention",
    ),
    "tensor": small({"tensor": 4}, 8192),
    "tensor, sequence parallel": small(SPLIT, 8192),
    "tensor, sequence parallel, recompute": small(SPLIT, 8192, strategy="recompute"),
    "tensor, sharded": small({**SPLIT, **SHARDED}, 32768),
    "tensor, sharded, pieces": small(
        {**SPLIT, **SHARDED, "micro_sequences": 4}, 65536, checkpointing=True
    ),
    "all axes": small(
        {"tensor": 2, "sequence_parallel": True, "sequence_data": 2, "data": 2, **SHARDED},
        65536,
        2,
        checkpointing=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_estimated_as_it_allocates(name: str) -> None:
    case = CASES[name]
    moment, items = case.estimate()
    allocated, table = step_peak(case)
    said = "\n".join(f"{item.num_bytes / 2**20:10.2f} MiB {item.name}" for item in items)
    message = f"{moment}\n{said}\n\n{table}"
    assert total(items) - UNSEEN == pytest.approx(allocated, rel=0.03), message
