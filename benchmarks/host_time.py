"""Times what the host needs for a call of the head, loss and gradients; a JSON list of rows.

    python -m benchmarks.host_time --shape llama3-8b --json results.json

The device is kept busy by a kernel that only waits, so that no launch waits for the device and no
idle device shortens it. The time ends when the call returns, before the device has begun. Calls of
all configurations are interleaved.

`time_ms` is that of a host that runs ahead of the device, as where the host is what a step waits
for: of several calls one after the other, each but the first. `after_wait_ms` is that of the first,
whose code and data the processor has to fetch again after it waited for the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import SHAPES, Case, make_case
from benchmarks.measure import environment, summary
from benchmarks.ours import GRPO, make_head
from fastrl.layers.language_model_head import LanguageModelHead

# More than the calls need, at some 2 GHz. Their launches fit the driver's queue, of some 1,000.
BUSY_CYCLES = 100_000_000
CALLS = 3


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama3-8b", help=f"among {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    rows = host_times(options.shape, options.repeats, options.warmup)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        metrics = "metrics" if row["metrics"] else ""
        print(
            f"{row['shape_name']} {row['strategy']:12s} {metrics:8s} {row['time_ms']:7.3f} ms"
            f" [{row['time_p20_ms']:.3f} {row['time_p80_ms']:.3f}],"
            f" of them backward {row['backward_ms']:.3f};"
            f" after a wait {row['after_wait_ms']:.3f}; {row['gpu']}"
        )


def host_times(shape: str, repeats: int, warmup: int) -> list[dict[str, Any]]:
    """A row for each strategy, with metrics and without."""
    case = make_case(SHAPES[shape], "cuda" if torch.cuda.is_available() else "cpu")
    heads = {
        (strategy, metrics): make_head(case, strategy, GRPO, metrics)
        for strategy in ("single_pass", "recompute")
        for metrics in (False, True)
    }
    times: dict[tuple[str, bool], list[list[tuple[float, float]]]] = {key: [] for key in heads}
    gc.collect()
    gc.disable()
    for repeat in range(warmup + repeats):
        for key, head in heads.items():
            found = calls(case, head)
            if repeat >= warmup:
                times[key].append(found)
    gc.enable()
    return [
        {
            "strategy": strategy,
            "metrics": metrics,
            "shape_name": shape,
            **summary([sum(one) for _, *ahead in of_head for one in ahead]),
            "backward_ms": _median([backward for _, *ahead in of_head for _, backward in ahead]),
            "after_wait_ms": _median([sum(first) for first, *_ in of_head]),
            **environment(),
        }
        for (strategy, metrics), of_head in times.items()
    ]


def calls(case: Case, head: LanguageModelHead) -> list[tuple[float, float]]:
    """Milliseconds until forward and backward have returned, of calls on a device that is busy."""
    hidden, weight = case.hidden_states, head.weight
    if hidden.is_cuda:
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        loss = head(hidden, case.batch).loss
        middle = time.perf_counter()
        torch.autograd.grad(loss, (hidden, weight))
        end = time.perf_counter()
        times.append((1e3 * (middle - start), 1e3 * (end - middle)))
    return times


def _median(times: list[float]) -> float:
    return summary(times)["time_ms"]


if __name__ == "__main__":
    main()
