"""Random layouts of one batch, and how many different statistics they gave.

    python -m tests.gpu.bits --layouts 1000 --json bits.json
    torchrun --standalone --nproc-per-node 4 -m tests.gpu.bits --layouts 200 --json bits.json

A layout is a choice of documents, their order, micro-batches, padding, strategy, chunks, metrics,
evaluation, or vocabulary shards: one after the other in one process, on the ranks of torchrun
where there are several. With `deterministic` there is one value; `--off` leaves the key out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import environment
from tests.helpers.bit_layouts import Hashes, Layout, Problem, statistics_of

# name: share of the layouts, dtype, D, V, cap. Fused kernels, and products with rows for fp32.
PROBLEMS = {
    "bf16": (0.64, torch.bfloat16, 1024, 128256, None),
    "softcap": (0.12, torch.bfloat16, 512, 50257, 30.0),
    "fp16": (0.12, torch.float16, 256, 32000, None),
    "fp32": (0.12, torch.float32, 100, 5000, None),
}
# Layouts between two reports of where a problem stands.
REPORTED = 20


def main() -> int:
    """Runs the layouts; 0 if the statistics of each problem have one value."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=int, default=1000)
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--length", type=int, default=120, help="most tokens of a document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--off", action="store_true", help="without `deterministic`")
    parser.add_argument("--json", type=Path, help="written by rank 0, as the layouts go")
    options = parser.parse_args()
    on_gpu, group = torch.cuda.is_available(), None
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        group = dist.group.WORLD
    rows: list[dict[str, Any]] = []
    report = {**environment(), "deterministic": not options.off, "problems": rows}
    for name in options.problems.split(","):
        rows.append({})
        for row in run(name, options, "cuda" if on_gpu else "cpu", group):
            rows[-1] = row
            if options.json and int(os.environ.get("RANK", 0)) == 0:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
        sys.stdout.write(" | ".join(f"{key} {value}" for key, value in row.items()) + "\n")
        sys.stdout.flush()
    if group is not None:
        dist.destroy_process_group()
    return int(any(row["values"] != 1 for row in rows))


def run(
    name: str, options: argparse.Namespace, device: str, group: dist.ProcessGroup | None
) -> Iterator[dict[str, Any]]:
    """Where the layouts of a problem stand, now and then and at the end."""
    share, dtype, hidden_size, vocab_size, softcap = PROBLEMS[name]
    begin = time.monotonic()
    problem = Problem.draw(
        12, options.length, hidden_size, vocab_size, dtype=dtype, device=device, softcap=softcap
    )
    problem = replace(problem, group=group)
    draws, hashes = random.Random(f"{options.seed} {name}"), Hashes()
    paths: Counter[str] = Counter()
    different: Counter[str] = Counter()
    number = max(round(options.layouts * share), 1)
    while hashes.count < number:
        layout = Layout.draw(problem, draws)
        paths[layout.path] += 1
        if not hashes.add(statistics_of(problem, layout, not options.off)):
            different[layout.path] += 1
        if hashes.count % REPORTED == 0 or hashes.count == number:
            yield {
                "problem": name,
                "layouts": hashes.count,
                "values": len(hashes.found),
                "largest_difference": hashes.largest_difference,
                "paths": dict(paths),
                "different": dict(different),
                "seconds": round(time.monotonic() - begin, 1),
            }


if __name__ == "__main__":
    sys.exit(main())
