"""Times the head and its peers; results as a JSON list of rows.

    python -m benchmarks.lm_head --shape llama3-8b --passes fwd,fwdbwd --json results.json

Every implementation passes a gate on its gradients before it is timed; one that does not run is
listed with the reason. `tflops` counts the products that it executes, over the rows that it
takes; the floor is the matrix products alone on the operands of the same case.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import (
    SHAPES,
    Case,
    Truth,
    make_case,
    make_truth,
    reference_logprobs,
)
from benchmarks.measure import (
    Step,
    environment,
    floor_steps,
    peak_bytes,
    relative_error,
    summary,
    time_interleaved,
)
from benchmarks.ours import OURS, gspo
from benchmarks.peers import PEERS, Implementation, NotRun
from benchmarks.products import Products, number_of_rows, operations

# bf16 logits alone cost 6e-2.
GATE = 0.15

# The products alone, over the rows of the case.
FLOORS = {
    "fwd": {
        "floor all": Products("all", "f"),
        "floor active": Products("active", "f"),
        "floor labelled": Products("labelled", "f"),
    },
    "fwdbwd": {
        "floor all": Products("all", "fhw"),
        "floor active": Products("active", "fhw"),
        "floor recompute active": Products("active", "ffhw"),
    },
}


@dataclass
class Entry:
    """An implementation on a case: the step to time, its products, and its row of results."""

    step: Step
    products: tuple[Products, ...] | None
    row: dict[str, Any]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--impl", default="all", help="comma-separated beginnings of names")
    parser.add_argument("--shape", default="llama3-8b", help=f"among {', '.join(SHAPES)}")
    parser.add_argument("--passes", default="fwd,fwdbwd")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for shape in options.shape.split(","):
        for part in run_shape(shape, options, device):
            rows += part
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if not options.json:
        print(json.dumps(rows, indent=1))


def run_shape(
    name: str, options: argparse.Namespace, device: str
) -> Iterator[list[dict[str, Any]]]:
    """The rows of a shape, one kind of pass after the other."""
    case = make_case(SHAPES[name], device)
    chosen = [
        implementation
        for implementation in (*OURS, *PEERS)
        if options.impl == "all"
        or any(implementation.name.startswith(name) for name in options.impl.split(","))
    ]
    truths = make_truths(case, {implementation.objective for implementation in chosen})
    for passes in options.passes.split(","):
        yield run_passes(case, truths, chosen, passes, options)
        gc.collect()


def make_truths(case: Case, objectives: set[str]) -> dict[str, Truth]:
    """By objective; always GRPO's, whose gradient of logits is the floors' operand."""
    truths = {"grpo": make_truth(case, case.grpo)}
    if "gspo" in objectives:
        truths["gspo"] = make_truth(case, gspo(case), most_rows=0)
    if "cross_entropy" in objectives:
        truths["cross_entropy"] = make_truth(
            case, case.cross_entropy, most_rows=0, rows=case.labelled
        )
    return truths


def run_passes(
    case: Case,
    truths: dict[str, Truth],
    implementations: list[Implementation],
    passes: str,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Gate, then time, all implementations interleaved with the floors."""
    rows: list[dict[str, Any]] = []
    entries: dict[str, Entry] = {}
    for implementation in implementations:
        if (implementation.logprobs if passes == "fwd" else implementation.loss) is None:
            continue
        row = new_row(case, implementation, passes)
        rows.append(row)
        try:
            step = gated_step(case, truths, implementation, passes, row)
        except NotRun as reason:
            row["reason"] = str(reason)
            continue
        except Exception as error:  # a peer's own failure is a result
            if implementation in OURS:
                raise
            row["reason"] = f"{type(error).__name__}: {str(error)[:300]}"
            gc.collect()
            continue
        entries[f"{implementation.name} ({implementation.strategy})"] = Entry(
            step, implementation.executed(passes), row
        )
    steps = {name: entry.step for name, entry in entries.items()} | floors(
        case, truths["grpo"], passes
    )
    times = time_interleaved(steps, options.repeats, options.warmup)
    for name, entry in entries.items():
        entry.row.update(summary(times[name]))
        entry.row["tflops"] = rate(case, entry.products, entry.row["time_ms"])
    medians = {name: summary(times[name])["time_ms"] for name in steps if name not in entries}
    for row in rows:
        row["floor_ms"] = medians["floor all"]
        row["floor_active_ms"] = medians["floor active"]
        row["floor_recompute_active_ms"] = medians.get("floor recompute active")
        row["floor_labelled_ms"] = medians.get("floor labelled")
    show(case, passes, rows)
    return rows


def new_row(case: Case, implementation: Implementation, passes: str) -> dict[str, Any]:
    """What is known before anything runs."""
    shape = case.shape
    return {
        "implementation": implementation.name,
        "strategy": implementation.strategy if passes == "fwdbwd" else "forward",
        "loss": implementation.objective if passes == "fwdbwd" else "logprobs",
        "shape_name": shape.name,
        "shape": [shape.num_tokens, shape.hidden_size, shape.vocab_size],
        "dtype": str(shape.dtype).removeprefix("torch."),
        "softcap": shape.softcap,
        "rows_labelled": len(case.labelled),
        "rows_active": len(case.active),
        "passes": passes,
        **environment(),
    }


def gated_step(
    case: Case,
    truths: dict[str, Truth],
    implementation: Implementation,
    passes: str,
    row: dict[str, Any],
) -> Step:
    """The step to time, after its errors were found small enough."""
    if passes == "fwd":
        assert implementation.logprobs is not None
        forward = implementation.logprobs(case)
        check_logprobs(case, forward(), row)
        row["peak_bytes_over_inputs"] = peak_bytes(forward)
        return forward
    assert implementation.loss is not None
    loss = implementation.loss(case)
    hidden, weight = case.hidden_states, case.weight

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(hidden, weight), (hidden, weight))

    grad_hidden, grad_weight = step()
    truth = truths[row["loss"]]
    row["error_loss"] = abs(float(loss(hidden, weight).detach() - truth.loss))
    row["error_grad_hidden"] = relative_error(grad_hidden, truth.grad_hidden)
    row["error_grad_weight"] = relative_error(grad_weight, truth.grad_weight)
    worst = max(row["error_grad_hidden"], row["error_grad_weight"])
    if not worst < GATE:
        raise NotRun(f"gate: gradient error {worst:.2g}")
    del grad_hidden, grad_weight
    row["peak_bytes_over_inputs"] = peak_bytes(step)
    return step


def check_logprobs(case: Case, logprobs: Tensor, row: dict[str, Any]) -> None:
    """Mean absolute and mean error against float64, on some labelled rows."""
    sample = case.labelled[:: max(len(case.labelled) // 256, 1)]
    errors = logprobs[sample].double() - reference_logprobs(case, torch.float64, sample)
    error = float(errors.abs().mean())
    row["error_logprobs"] = error
    row["bias_logprobs"] = float(errors.mean())
    if not error < 0.1:
        raise NotRun(f"gate: log-probability error {error:.2g}")


def floors(case: Case, truth: Truth, passes: str) -> dict[str, Step]:
    """The products alone, on all tokens and on those that must be touched."""
    return {
        name: floor_steps(case, truth, number_of_rows(case, products.rows), products.kinds)
        for name, products in FLOORS[passes].items()
    }


def rate(case: Case, products: tuple[Products, ...] | None, milliseconds: float) -> float | None:
    """TFLOP/s of the products that were executed; None where they are not known."""
    if products is None:
        return None
    return round(operations(case, products) / milliseconds / 1e9, 4)


def show(case: Case, passes: str, rows: list[dict[str, Any]]) -> None:
    """A short table."""
    first = rows[0]
    print(
        f"\n{case.shape.name} {passes}: floors all {first['floor_ms']:.2f}, active"
        f" {first['floor_active_ms']:.2f}, recompute {first['floor_recompute_active_ms']},"
        f" labelled {first['floor_labelled_ms']} ms; {first['gpu']}"
    )
    for row in rows:
        if "time_ms" not in row:
            print(f"  {row['implementation']:32s} {row.get('reason')}")
            continue
        base = row["floor_labelled_ms"] if passes == "fwd" else row["floor_active_ms"]
        if row["strategy"] == "recompute" and row["implementation"].startswith("fastrl"):
            base = row["floor_recompute_active_ms"]
        errors = [row.get(f"error_{k}") for k in ("grad_hidden", "grad_weight", "logprobs")]
        peak, tflops = row["peak_bytes_over_inputs"], row["tflops"]
        print(
            f"  {row['implementation']:32s} {row['strategy']:12s} {row['time_ms']:8.2f} ms"
            f" [{row['time_p20_ms']:.2f} {row['time_p80_ms']:.2f}] x{row['time_ms'] / base:.3f}"
            f" {'-' if tflops is None else f'{tflops:.0f}'} TFLOP/s"
            f" peak {-1 if peak is None else peak / 2**30:.3f} GiB errors "
            + " ".join("-" if e is None else f"{e:.2e}" for e in errors),
            flush=True,
        )


if __name__ == "__main__":
    main()
