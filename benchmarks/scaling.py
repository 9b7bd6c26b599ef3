"""Strong scaling of the head over the GPUs of one host, and the collectives' share of its time.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.scaling --json results.json

The same batch on one GPU and on all: tensor parallel with and without sequence parallel, and
sequence-data parallel. Each layout passes a gate on loss and gradients first. `nccl_ms` is the time
that NCCL kernels ran, waiting for other ranks included; `exposed_ms` the part of it in which no
other kernel ran. The sum of a replicated weight's gradient over sequence-data ranks belongs to the
data-parallel wrapper and is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import environment, relative_error
from benchmarks.ours import GRPO, GSPO
from benchmarks.problems import SHAPES, Problem, make_problem
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
class Case:
    """A head on one layout and this rank's part of its inputs."""

    layout: str
    head: LanguageModelHead
    hidden: Tensor
    batch: BatchKwargs

    def step(self) -> Tensor:
        """Forward and backward; the loss of this rank."""
        self.hidden.grad = self.head.weight.grad = None
        loss = self.head(self.hidden, self.batch).loss
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.detach()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama3-8b-32k", help=f"among {', '.join(SHAPES)}")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--losses", default="grpo,gspo")
    parser.add_argument("--strategies", default="auto,recompute")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    problem = interleaved(make_problem(SHAPES[arguments.shape], device))
    rows: list[dict[str, Any]] = []
    for loss in arguments.losses.split(","):
        for strategy in arguments.strategies.split(","):
            base = None
            for layout in arguments.layouts.split(","):
                case = make_case(layout, problem, loss, strategy)
                row = {"layout": layout, "loss": loss, "strategy": strategy, "gate": 0.0}
                if layout == "one_gpu":
                    whole = results(case, problem)
                else:
                    row["gate"] = compare(case, problem, whole)
                row |= measure(case.step, arguments.repeats, arguments.warmup)
                base = row["time_ms"] if layout == "one_gpu" else base
                row["speedup"] = round(base / row["time_ms"], 3) if base else None
                rows.append(row)
                say(row)
                del case
    rows.append(weight_reduction(problem, arguments.repeats, arguments.warmup))
    say(rows[-1])
    if dist.get_rank() == 0 and arguments.json is not None:
        report = {
            **environment(),
            "ranks": dist.get_world_size(),
            "shape": arguments.shape,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def interleaved(problem: Problem) -> Problem:
    """The problem with documents of zero advantage among the others, not all at the end.

    As in a real batch; contiguous parts of the packed sequence then carry about as much gradient.
    """
    shape, batch = problem.shape, problem.batch
    turn = shape.num_documents // 4
    documents = torch.arange(shape.num_documents).view(4, turn).t().flatten()
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
    hidden = problem.hidden_states.detach()[index].requires_grad_()
    return replace(problem, hidden_states=hidden, batch=batch)


def make_case(layout: str, problem: Problem, loss: str, strategy: str) -> Case:
    """This rank's part of the problem."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    groups = {
        "one_gpu": ParallelGroups(),
        "tp": ParallelGroups(tp=world),
        "tp_sp": ParallelGroups(tp=world, sp=world),
        "sdp": ParallelGroups(sdp=world),
    }[layout]
    shape = problem.shape
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
    hidden, weight, batch = problem.hidden_states.detach(), problem.weight.detach(), problem.batch
    if groups.tp is not None:
        weight = weight[slice(*vocab_shard(shape.vocab_size, rank, size))].clone()
    if groups.sp is not None:
        hidden = hidden.chunk(size)[rank].clone()
    if groups.sdp is not None:
        slots = shard_slots(shape.num_tokens, rank=rank, size=size)[0]
        first, last = int(slots[0]), int(slots[-1]) + 1
        hidden = hidden[first:last].clone()
        names = ("labelled_rows", "active_rows", "active_document_rows")
        sets = {
            n: r.within(first, last) for n in names if isinstance(r := getattr(batch, n), RowSet)
        }
        batch = batch.select(slice(first, last)).replace(**sets)
        batch = batch.replace(whole_documents=shape.num_documents % size == 0)
    head.weight = nn.Parameter(weight)
    return Case(layout, head, hidden.requires_grad_(), batch)


def results(case: Case, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of the whole problem from all ranks' parts."""
    loss = case.step().clone()
    grad_hidden, grad_weight = case.hidden.grad, case.head.weight.grad
    assert grad_hidden is not None
    assert grad_weight is not None
    if case.layout == "sdp":
        dist.all_reduce(loss)
        grad_weight = grad_weight.float()
        dist.all_reduce(grad_weight)
    if case.layout in ("sdp", "tp_sp"):
        grad_hidden = gathered(grad_hidden)
    if case.layout in ("tp", "tp_sp"):
        grad_weight = gathered(grad_weight)[: problem.shape.vocab_size]
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


def compare(case: Case, problem: Problem, whole: tuple[Tensor, Tensor, Tensor]) -> float:
    """The largest relative difference from one GPU; beyond the gate nothing is timed."""
    parts = results(case, problem)
    errors = [relative_error(part, truth.float()) for part, truth in zip(parts, whole, strict=True)]
    if max(errors) > GATE:
        raise AssertionError(f"{case.layout}: loss, dh and dW differ from one GPU's by {errors}")
    return round(max(errors), 6)


def measure(step: Callable[[], object], repeats: int, warmup: int) -> dict[str, Any]:
    """Median over repeats of the slowest rank's time, peak memory, and NCCL's share of a step."""
    for _ in range(warmup):
        step()
    if not torch.cuda.is_available():  # a trial of the script
        start = time.perf_counter()
        step()
        return {"time_ms": round(1e3 * (time.perf_counter() - start), 3)}
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
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return {
        "time_ms": round(statistics.median(ordered), 3),
        "time_p20_ms": round(ordered[len(ordered) // 5], 3),
        "time_p80_ms": round(ordered[len(ordered) * 4 // 5], 3),
        "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 3),
        **nccl_share(step),
    }


def nccl_share(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a step in which NCCL ran, and in which nothing else did; means of ranks."""
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    nccl: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for event in recorded.events():
        if event.device_type.name == "CUDA":
            span = (event.time_range.start, event.time_range.end)
            (nccl if "nccl" in event.name.lower() else others).append(span)
    busy, both = covered(nccl), covered(nccl) + covered(others) - covered(nccl + others)
    shares = torch.tensor([busy, busy - both], device="cuda") / 1e3 / dist.get_world_size()
    dist.all_reduce(shares)
    return {"nccl_ms": round(shares[0].item(), 3), "exposed_ms": round(shares[1].item(), 3)}


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def weight_reduction(problem: Problem, repeats: int, warmup: int) -> dict[str, Any]:
    """The all-reduce of a whole weight gradient, which a data-parallel wrapper does."""
    grad = torch.zeros_like(problem.weight)
    row = {"layout": "dW all-reduce", "bytes": grad.nbytes}
    return row | measure(lambda: dist.all_reduce(grad), repeats, warmup)


def say(row: dict[str, Any]) -> None:
    """Prints a row on rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
