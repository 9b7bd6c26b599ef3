"""Gate, time and memory of implementations, interleaved in one process."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Truth

Step = Callable[[], object]


def relative_error(result: Tensor, truth: Tensor) -> float:
    """||result - truth|| / ||truth||; NaN shows."""
    return float((result.float() - truth).norm() / truth.norm())


def time_interleaved(
    steps: Mapping[str, Step], repeats: int, warmup: int
) -> dict[str, list[float]]:
    """Milliseconds of each repeat of each step; one repeat of all steps after the other."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    cuda = torch.cuda.is_available()
    marks: list[tuple[str, Any, Any]] = []
    for repeat in range(warmup + repeats):
        for name, step in steps.items():
            if not cuda:
                start = time.perf_counter()
                step()
                if repeat >= warmup:
                    times[name].append(1e3 * (time.perf_counter() - start))
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            if repeat >= warmup:
                marks.append((name, begin, end))
    if cuda:
        torch.cuda.synchronize()
    for name, begin, end in marks:
        times[name].append(begin.elapsed_time(end))
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Median and the 20th and 80th percentile, in ms."""
    ordered = sorted(times)
    pick = lambda share: ordered[min(int(share * len(ordered)), len(ordered) - 1)]  # noqa: E731
    return {
        "time_ms": round(statistics.median(ordered), 4),
        "time_p20_ms": round(pick(0.2), 4),
        "time_p80_ms": round(pick(0.8), 4),
    }


def peak_bytes(step: Step) -> int | None:
    """Most bytes above those before the step, results included."""
    if not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def even_chunks(total: int, most: int) -> list[int]:
    """Sizes of even chunks."""
    count = -(-total // most)
    return [total // count + (i < total % count) for i in range(count)]


def floor_steps(case: Case, truth: Truth, num_rows: int, products: str) -> Step:
    """The cuBLAS products alone on the case's operands, in even chunks of at most 9000 rows.

    Args:
        case: whose hidden states and weight.
        truth: whose gradient of logits is the operand dz, repeated where there are more rows.
        num_rows: how many rows the products have.
        products: `f` h W^T, `h` dz W, `w` dz^T h; each letter is one product.
    """
    weight = case.weight.detach()
    sizes = even_chunks(num_rows, len(truth.grad_logits) if num_rows > 9000 else num_rows)
    most = max(sizes)
    hidden = case.hidden_states.detach()
    repeats = -(-most // len(hidden))
    hidden = hidden.repeat(repeats, 1)[:most].contiguous()
    dz = truth.grad_logits
    if len(dz) < most:
        dz = dz.repeat(-(-most // len(dz)), 1)[:most]
    logits = torch.empty(most, weight.shape[0], dtype=weight.dtype, device=weight.device)
    total = torch.zeros(weight.shape, device=weight.device) if len(sizes) > 1 else None

    def run() -> None:
        for size in sizes:
            for letter in products:
                if letter == "f":
                    torch.mm(hidden[:size], weight.t(), out=logits[:size])
                elif letter == "h":
                    torch.mm(dz[:size], weight)
                elif total is None:
                    torch.mm(dz[:size].t(), hidden[:size])
                else:
                    torch.addmm(
                        total, dz[:size].t(), hidden[:size], out_dtype=torch.float32, out=total
                    )

    return run


def environment() -> dict[str, Any]:
    """Versions, the card, and the commit that was measured."""
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "gpu": gpu,
        "driver": _output(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        **_commit(),
    }


def _commit() -> dict[str, Any]:
    """What was measured; a copy of the working tree with another history says it itself."""
    if "FASTRL_COMMIT" in os.environ:
        return {
            "commit": os.environ["FASTRL_COMMIT"],
            "dirty": os.environ.get("FASTRL_DIRTY") == "1",
        }
    return {
        "commit": _output("git", "rev-parse", "HEAD") or "unknown",
        "dirty": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
    }


def _output(*command: str) -> str:
    """What a command prints; nothing where it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
