"""Strong scaling of the head over the GPUs of one host, and the collectives' share of its time.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.scaling --json results.json

The same batch on one GPU and on all: tensor parallel with and without sequence parallel, and
sequence-data parallel. Each layout passes a gate on loss and gradients first. `nccl_ms` is the time
that NCCL kernels ran, waiting for other ranks included; `exposed_ms` the part of it in which no
other kernel ran, and `nccl_share` and `exposed_share` are the same as shares of `time_ms`.
`speedup` is over one GPU with the same loss and strategy. The sum of a replicated weight's gradient
over sequence-data ranks belongs to the data-parallel wrapper and is a row of its own.

The file is written anew after every row, so that a run that is cut short leaves what it has. A row
with `error` was not timed; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import SHAPES, Case, make_case
from benchmarks.measure import environment, relative_error
from benchmarks.ours import GRPO, GSPO
from fastrl.config import LanguageModelHeadConfig
from fastrl.data.slices import shard_slots
from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.layers.language_model_head import LanguageModelHead
from fastrl.parallel import ParallelGroups, vocab_shard

# bf16 products rounded in another order.
GATE = 1e-2
LAYOUTS = ("one_gpu", "tp_sp", "tp", "sdp")
LOSSES = {"grpo": GRPO, "gspo": GSPO}


@dataclass(frozen=True)
class ShardedCase:
    """A head on one layout and this rank's part of its inputs."""

    layout: str
    head: LanguageModelHead
    hidden: Tensor
    batch: BatchKwargs
    ran: list[str | None] = field(default_factory=list)  # the strategy of each step

    def step(self) -> Tensor:
        """Forward and backward; the loss of this rank."""
        self.hidden.grad = self.head.weight.grad = None
        output = self.head(self.hidden, self.batch)
        self.ran.append(output.strategy)
        loss = output.loss
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.detach()


class Report:
    """The rows, printed and written by rank 0 as they come."""

    def __init__(self, file: Path | None, shape: str) -> None:
        self.file = file if dist.get_rank() == 0 else None
        self.rows: list[dict[str, Any]] = []
        self.head = {**environment(), "ranks": dist.get_world_size(), "shape": shape}

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, with its speed-up over the row of one GPU where that was timed."""
        for base in self.rows:
            same = all(base.get(key) == row.get(key) for key in ("loss", "strategy"))
            if same and base["layout"] == "one_gpu" and "time_ms" in row and "time_ms" in base:
                row["speedup"] = round(base["time_ms"] / row["time_ms"], 3)
        self.rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
        if self.file is not None:
            text = json.dumps(self.head | {"rows": self.rows}, indent=1)
            partial = self.file.with_suffix(".partial")
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self.file)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama3-8b-32k", help=f"among {', '.join(SHAPES)}")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--losses", default="grpo,gspo")
    parser.add_argument("--strategies", default="auto,recompute")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=480, help="after so many no further row is begun"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = time.monotonic()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # A rank that fails alone leaves the others in a collective, which then ends the job.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    report = Report(arguments.json, arguments.shape)
    case = interleaved(make_case(SHAPES[arguments.shape], device))
    times = (arguments.repeats, arguments.warmup)
    report.add(weight_reduction(case, *times))
    for loss in arguments.losses.split(","):
        for strategy in arguments.strategies.split(","):
            whole = None
            for layout in arguments.layouts.split(","):
                row: dict[str, Any] = {"layout": layout, "loss": loss, "strategy": strategy}
                if any_rank(time.monotonic() - started > arguments.seconds):
                    report.add(row | {"error": f"not begun within {arguments.seconds:.0f} s"})
                    continue
                sharded = shard_case(layout, case, loss, strategy)
                error = ""
                try:
                    parts = results(sharded, case)
                    whole = whole or parts
                    row |= {"ran": sharded.ran[-1], "gate": compare(parts, whole)}
                    row |= measure(sharded.step, *times)
                except Exception:
                    error = traceback.format_exc()
                    print(error, file=sys.stderr, flush=True)
                if any_rank(bool(error)):
                    row["error"] = error or "on another rank"
                report.add(row)
                del sharded
    dist.destroy_process_group()
    return int(any("error" in row for row in report.rows))


def any_rank(flag: bool) -> bool:
    """Whether any rank has the flag."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = torch.tensor(int(flag), device=device)
    dist.all_reduce(total)
    return bool(total)


def interleaved(case: Case) -> Case:
    """The case with documents of zero advantage among the others, not all at the end.

    So are long completions among short ones: contiguous parts of the packed sequence then carry
    as much gradient to within 0.5 %, and the slowest rank is not one with more work.
    """
    shape, batch = case.shape, case.batch
    turn = shape.num_documents // 4
    from_ends = torch.stack([torch.arange(turn), torch.arange(turn).flip(0)], 1).flatten()[:turn]
    documents = torch.arange(shape.num_documents).view(4, turn)[:, from_ends].t().flatten()
    slots = documents[:, None] * shape.document_length + torch.arange(shape.document_length)
    index = slots.flatten().to(batch.labels.device)
    host = batch.select(index).to("cpu")
    assert host.advantages is not None
    active = RowSet.from_mask(host.advantages != 0, host.document_index)
    batch = host.replace(
        labelled_rows=RowSet.from_mask(host.labels != -100, host.document_index),
        active_rows=active,
        active_document_rows=active,
    ).to(batch.labels.device)
    hidden = case.hidden_states.detach()[index].requires_grad_()
    return replace(case, hidden_states=hidden, batch=batch)


def shard_case(layout: str, case: Case, loss: str, strategy: str) -> ShardedCase:
    """This rank's part of the case."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    groups = {
        "one_gpu": ParallelGroups(),
        "tp": ParallelGroups(tp=world),
        "tp_sp": ParallelGroups(tp=world, sp=world),
        "sdp": ParallelGroups(sdp=world),
    }[layout]
    shape = case.shape
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "losses": {"policy": LOSSES[loss]},
            # Documents over ranks leave one strategy.
            "strategy": "auto" if layout == "sdp" and loss == "gspo" else strategy,
            "metrics": False,
        }
    )
    head = LanguageModelHead(config, groups, device="meta", dtype=shape.dtype)
    hidden, weight, batch = case.hidden_states.detach(), case.weight.detach(), case.batch
    if groups.tp is not None:
        weight = weight[slice(*vocab_shard(shape.vocab_size, rank, size))].clone()
    if groups.sp is not None:
        hidden = hidden.chunk(size)[rank].clone()
    if groups.sdp is not None:
        slots = shard_slots(shape.num_tokens, rank=rank, size=size)[0]
        first, last = int(slots[0]), int(slots[-1]) + 1
        hidden = hidden[first:last].clone()
        whole = shape.num_documents % size == 0
        batch = batch.span(first, last).replace(whole_documents=whole)
    head.weight = nn.Parameter(weight)
    return ShardedCase(layout, head, hidden.requires_grad_(), batch)


def results(sharded: ShardedCase, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of the whole case from all ranks' parts."""
    loss = sharded.step().clone()
    grad_hidden, grad_weight = sharded.hidden.grad, sharded.head.weight.grad
    assert grad_hidden is not None
    assert grad_weight is not None
    if sharded.layout == "sdp":
        dist.all_reduce(loss)
        grad_weight = grad_weight.float()
        dist.all_reduce(grad_weight)
    if sharded.layout in ("sdp", "tp_sp"):
        grad_hidden = gathered(grad_hidden)
    if sharded.layout in ("tp", "tp_sp"):
        grad_weight = gathered(grad_weight)[: case.shape.vocab_size]
    return loss, grad_hidden, grad_weight


def gathered(part: Tensor) -> Tensor:
    """All ranks' parts one after the other; parts of unequal length are filled up at the end."""
    most = torch.tensor(part.shape[0], device=part.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    padded = part.new_zeros(int(most), *part.shape[1:])
    padded[: part.shape[0]] = part
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return torch.cat(parts)


def compare(parts: tuple[Tensor, ...], whole: tuple[Tensor, ...]) -> float:
    """The largest relative difference from one GPU; beyond the gate nothing is timed."""
    errors = [relative_error(part, truth.float()) for part, truth in zip(parts, whole, strict=True)]
    if any_rank(not max(errors) <= GATE):
        raise AssertionError(f"loss, dh and dW differ from one GPU's by {errors}")
    return round(max(errors), 6)


def measure(step: Callable[[], object], repeats: int, warmup: int) -> dict[str, Any]:
    """Median over repeats of the slowest rank's time, peak memory, and NCCL's share of a step."""
    for _ in range(warmup):
        step()
    if not torch.cuda.is_available():  # a trial of the script
        start = time.perf_counter()
        step()
        return {"time_ms": round(1e3 * (time.perf_counter() - start), 3)} | shares(0, 0, 1)
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item())
    ordered = sorted(times)
    time_ms = statistics.median(ordered)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return {
        "time_ms": round(time_ms, 3),
        "time_p20_ms": round(ordered[len(ordered) // 5], 3),
        "time_p80_ms": round(ordered[len(ordered) * 4 // 5], 3),
        "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 3),
        **shares(*nccl_time(step), time_ms),
    }


def shares(nccl_ms: float, exposed_ms: float, time_ms: float) -> dict[str, float]:
    """NCCL's time and the part of it with nothing beside it, also as shares of a step."""
    return {
        "nccl_ms": round(nccl_ms, 3),
        "exposed_ms": round(exposed_ms, 3),
        "nccl_share": round(nccl_ms / time_ms, 4),
        "exposed_share": round(exposed_ms / time_ms, 4),
    }


def nccl_time(step: Callable[[], object], repeats: int = 3) -> tuple[float, float]:
    """Milliseconds of a step in which NCCL ran, and in which nothing else did; means of ranks."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeats):
            torch.cuda.synchronize()
            dist.barrier()  # inside, as the profiler starts at another time on every rank
            torch.cuda._sleep(1000)  # its kernel marks where the step begins, and where it ends
            step()
            torch.cuda._sleep(1000)
        torch.cuda.synchronize()
    kernels = [
        Span(event.name.lower(), event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type.name == "CUDA"
    ]
    microseconds = torch.tensor(nccl_spans(kernels), device="cuda").mean(0)
    dist.all_reduce(microseconds)
    busy, exposed = (microseconds / 1e3 / dist.get_world_size()).tolist()
    return busy, exposed


class Span(NamedTuple):
    """One kernel on the GPU."""

    name: str
    start: float
    end: float


def nccl_spans(kernels: list[Span]) -> list[tuple[float, float]]:
    """Time of NCCL, and of NCCL alone, between each two marks (kernels that sleep)."""
    marks = sorted(kernel[1:] for kernel in kernels if "spin_kernel" in kernel.name)
    steps = zip(marks[::2], marks[1::2], strict=True)
    times = []
    for (_, begin), (end, _) in steps:
        inside = [kernel for kernel in kernels if begin <= kernel.start < end]
        nccl = [kernel[1:] for kernel in inside if "nccl" in kernel.name]
        others = [kernel[1:] for kernel in inside if "nccl" not in kernel.name]
        times.append((covered(nccl), covered(nccl + others) - covered(others)))
    assert times, "the profiler saw no marks"
    return times


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def weight_reduction(case: Case, repeats: int, warmup: int) -> dict[str, Any]:
    """The all-reduce of a whole weight gradient, which a data-parallel wrapper does."""
    grad = torch.zeros_like(case.weight)
    row = {"layout": "dW all-reduce", "bytes": grad.nbytes}
    return row | measure(lambda: dist.all_reduce(grad), repeats, warmup)


if __name__ == "__main__":
    sys.exit(main())
