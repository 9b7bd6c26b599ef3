"""Predicted and measured peaks of memory: the head alone, and whole training steps, on one GPU.

    python -m benchmarks.memory --json benchmarks/results/memory.json

Each row has the estimate by item, the measured peak, and the blocks that lived at the peak by size
and by the line of fastrl that allocated them.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.cases import SHAPES, make_batch
from benchmarks.measure import environment
from benchmarks.memory_cases import (
    HEADS,
    STEPS,
    HeadCase,
    StepCase,
    head_step,
    meta_llama,
    new_mesh,
    step_batches,
    updates,
)


def measure_head(case: HeadCase) -> dict[str, Any]:
    """The peak above the head's inputs, its gradients included."""
    step = head_step(case, make_batch(SHAPES[case.shape]).to("cuda"), "cuda")
    step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    record()
    return {"measured": peak_of(step) - before, "blocks": recorded_blocks()}


def measure_step(case: StepCase) -> dict[str, Any]:
    """The peak of the second update, with parameters and optimizer states."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    before = torch.cuda.memory_allocated()
    record()
    mesh = new_mesh(case.parallel, "cuda")
    model = meta_llama(case, mesh).to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(std=0.02)
    pieces, whole = step_batches(case, model.groups)
    pieces = tuple(piece.to("cuda") for piece in pieces)
    update = updates(case, model, pieces, whole.to("cuda"))
    update()
    return {"measured": peak_of(update) - before, "blocks": recorded_blocks()}


def peak_of(step: Callable[[], object]) -> int:
    """Most bytes while `step` runs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = step()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated()


def record() -> None:
    """Keeps where every block is allocated from now on."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")


def recorded_blocks() -> list[dict[str, Any]]:
    """The largest blocks at the peak since `record`, which ends."""
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return blocks_at_peak(trace)


def blocks_at_peak(trace: list[dict[str, Any]], most: int = 24) -> list[dict[str, Any]]:
    """The largest blocks of a trace at the first of its moments with most bytes."""
    live: dict[int, dict[str, Any]] = {}
    total = height = last = 0
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            live[event["addr"]] = event
            total += event["size"]
            if total > height:
                height, last = total, index
        elif event["action"] == "free_requested" and event["addr"] in live:
            total -= live.pop(event["addr"])["size"]
    live.clear()
    for event in trace[: last + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    counts = Counter((block["size"], place(block.get("frames", []))) for block in live.values())
    ordered = sorted(counts.items(), key=lambda item: -item[0][0] * item[1])
    return [
        {"bytes": size * count, "size": size, "count": count, "from": where}
        for (size, where), count in ordered[:most]
    ]


def place(frames: list[dict[str, Any]]) -> str:
    """The innermost line of fastrl; else the innermost Python line."""
    ours = [frame for frame in frames if "/fastrl/" in frame["filename"]]
    for frame in [*ours, *frames]:
        name = "/".join(Path(frame["filename"]).parts[-3:])
        return f"{name}:{frame['line']} {frame['name']}"
    return "unknown"


def run(name: str, case: HeadCase | StepCase) -> dict[str, Any]:
    """The row of a case."""
    start = time.monotonic()
    moment, items = case.estimate()
    measured = measure_head(case) if isinstance(case, HeadCase) else measure_step(case)
    predicted = sum(item.num_bytes for item in items)
    if isinstance(case, HeadCase):
        kind, tokens = "head", SHAPES[case.shape].num_tokens
    else:
        kind, tokens = "step", case.tokens
    return {
        "case": name,
        "kind": kind,
        "tokens": tokens,
        "moment": moment,
        "predicted": predicted,
        "ratio": round(predicted / measured["measured"], 4),
        "items": {item.name: item.num_bytes for item in items},
        **measured,
        "seconds": round(time.monotonic() - start, 1),
        **environment(),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="names, with `;` between them; all without")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    # A compiled attention for every dtype, size and mask of the cases.
    torch._dynamo.config.recompile_limit = 64
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    cases: dict[str, HeadCase | StepCase] = {**HEADS, **STEPS}
    for name in options.cases.split(";") if options.cases else cases:
        case = cases[name]
        row = run(name, case)
        rows.append(row)
        print(
            f"{name:44s} predicted {row['predicted'] / 2**30:7.3f} GiB, measured"
            f" {row['measured'] / 2**30:7.3f} GiB, {row['ratio']:.3f}; {row['moment']};"
            f" {row['seconds']} s",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
