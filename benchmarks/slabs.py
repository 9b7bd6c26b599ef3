"""What the widths of recompute's slabs are worth: full blocks of columns against even slabs.

    python -m benchmarks.slabs --json benchmarks/results/slabs.json

Both cuts run interleaved in one process, forward and backward of GRPO; a ratio above 1 is what even
slabs take longer. `tiling._full_columns` is what is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.cases import SHAPES, make_case
from benchmarks.measure import environment, summary, time_interleaved
from benchmarks.ours import GRPO, make_head
from fastrl.functional.head import tiling

WIDTHS: dict[str, Callable[[int, int, int], int]] = {
    "full": tiling._full_columns,
    "even": lambda num_rows, num_columns, most: tiling.even_chunk(num_columns, most),
}


def measure(name: str, repeats: int, warmup: int) -> dict[str, object]:
    """A row: the time of each cut and their ratio."""
    case = make_case(SHAPES[name], "cuda" if torch.cuda.is_available() else "cpu")
    head = make_head(case, "recompute", GRPO, False)
    inputs = (case.hidden_states, head.weight)

    def step(widths: str) -> None:
        with patch.object(tiling, "_full_columns", WIDTHS[widths]):
            torch.autograd.grad(head(case.hidden_states, case.batch).loss, inputs)

    steps = {widths: (lambda widths=widths: step(widths)) for widths in WIDTHS}
    times = time_interleaved(steps, repeats, warmup)  # type: ignore[arg-type]
    medians = {widths: summary(times[widths])["time_ms"] for widths in WIDTHS}
    return {
        "shape_name": name,
        **{f"{widths}_ms": value for widths, value in medians.items()},
        "even_over_full": round(medians["even"] / medians["full"], 4),
        **environment(),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="llama3-8b,llama3-8b-32k,qwen3-1.7b,gemma2-2b")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    rows = []
    for name in options.shapes.split(","):
        rows.append(measure(name, options.repeats, options.warmup))
        print({key: rows[-1][key] for key in ("shape_name", "even_over_full")}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
