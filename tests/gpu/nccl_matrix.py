"""The operator and the model matrix on NCCL, as many ranks as torchrun starts (1, 2, 4 or 8).

    torchrun --standalone --nproc-per-node 2 -m tests.gpu.nccl_matrix --json results.json

The cases are those of `tests/distributed`, which CI runs on gloo: the head in float64 equals the
CPU's in one process, the Llama's training that on one GPU. Without GPUs it runs on gloo. Rank 0
writes the file anew after every case, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import environment
from tests.helpers.head_runs import FEW_RUNS, RUNS, assert_same_result, runs_on
from tests.helpers.layouts import EIGHT_RANKS, FOUR_RANKS, TWO_RANKS, Ranks
from tests.helpers.ranks import rank_device
from tests.helpers.same_training import (
    assert_same_training,
    in_one_process,
    train_in_one_process,
)
from tests.helpers.sharded_head import CASES, assemble, one_process, run_on_rank
from tests.helpers.sharded_training import VARIANTS, Training, Variant, train

LAYOUTS = {1: [Ranks()], 2: TWO_RANKS, 4: FOUR_RANKS, 8: EIGHT_RANKS}
# Sums over tokens on a GPU have another order than on one rank, and training amplifies it.
MODEL_TOLERANCE = 1e-4


def main() -> int:
    """Runs every case of this number of ranks; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where rank 0 writes the results")
    parser.add_argument("--parts", default="model,head", help="model, head or both")
    parser.add_argument("--variants", help="of the model, by name; default: all of so many ranks")
    parser.add_argument(
        "--seconds", type=float, default=480, help="after so many no further case is begun"
    )
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False
    # A rank that fails alone leaves the others in a collective, which then ends the job.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    report = Report(arguments.json, time.monotonic() + arguments.seconds)
    named = arguments.variants.split(",") if arguments.variants else [*VARIANTS]
    parts: dict[str, Callable[[Report], None]]
    parts = {"model": partial(run_models, named), "head": run_heads}
    for part in arguments.parts.split(","):
        parts[part](report)
    report.finish()
    dist.destroy_process_group()
    return int(bool(report.failed))


@dataclass
class Report:
    """A row a case; rank 0 prints those that fail, and writes all as they come."""

    file: Path | None
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=environment)

    def run(self, name: str, run: Callable[[], Any], check: Callable[[list[Any]], None]) -> None:
        """Runs a case on every rank and checks all answers on rank 0."""
        begin = time.monotonic()
        # Rank 0's clock decides.
        verdict = [begin > self.deadline]
        dist.broadcast_object_list(verdict, src=0, device=rank_device())
        if verdict[0]:
            self._add({"case": name, "error": "not begun: out of time"})
            return
        error, answer = "", None
        try:
            answer = run()
        except Exception:
            error = f"rank {dist.get_rank()}: {traceback.format_exc()}"
            sys.stderr.write(f"{name}: {error}")
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (error, answer))
        error = next((text for text, _ in answers if text), "")
        if dist.get_rank() == 0 and not error:
            try:
                check([value for _, value in answers])
            except AssertionError:
                error = traceback.format_exc(limit=1)
        seconds = round(time.monotonic() - begin, 3)
        self._add({"case": name, "error": error[-1000:], "seconds": seconds})

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["error"]]

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if dist.get_rank() != 0:
            return
        if row["error"]:
            sys.stdout.write(f"FAILED {row['case']}: {row['error']}\n")
        if len(self.rows) % 50 == 0:
            self._say()
        if self.file is not None:
            counts = {
                "backend": dist.get_backend(),
                "ranks": dist.get_world_size(),
                "cases": len(self.rows),
                "failed": len(self.failed),
            }
            partial = self.file.with_suffix(".partial")
            text = json.dumps(self.head | counts | {"rows": self.rows}, indent=1)
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self.file)

    def _say(self) -> None:
        sys.stdout.write(
            f"{len(self.rows)} cases on {dist.get_world_size()} ranks, {len(self.failed)} failed\n"
        )
        sys.stdout.flush()

    def finish(self) -> None:
        """The last line; every rank then knows of the cases that failed on rank 0."""
        if dist.get_rank() == 0:
            self._say()
        rows: list[Any] = [self.rows]
        dist.broadcast_object_list(rows, src=0, device=rank_device())
        self.rows = rows[0]


def run_heads(report: Report) -> None:
    """The head: every layout of this many ranks, every loss and strategy, boundary cases."""
    for layout in LAYOUTS[dist.get_world_size()]:
        for case_name in CASES:
            for name in runs_on(layout, RUNS if case_name == "ragged" else FEW_RUNS):
                run_head(report, case_name, name, layout)


def run_head(report: Report, case_name: str, name: str, layout: Ranks) -> None:
    def check(answers: list[Any]) -> None:
        whole = assemble(CASES[case_name], RUNS[name], layout, answers)
        assert_same_result(whole, one_process(case_name, RUNS[name]), name)

    where = f"head {case_name} {name} {layout}"
    report.run(where, lambda: run_on_rank(case_name, RUNS[name], layout), check)


def run_models(names: list[str], report: Report) -> None:
    """The Llama: three steps of every variant of this many ranks, and on FlexAttention."""
    size = dist.get_world_size()
    variants = [VARIANTS[name] for name in names if VARIANTS[name].ranks.world_size == size]
    if size == 2 and torch.cuda.is_available():
        variants += [
            replace(VARIANTS[name], name=f"{name}_flex", head_dim=16)
            for name in ("sdp2_zigzag", "sdp2_zigzag_ms2")
        ]
    for variant in variants:
        for config_name in ("llama_grpo", "llama_gspo"):
            run_model(report, config_name, variant)


def run_model(report: Report, config_name: str, variant: Variant) -> None:
    def check(answers: list[Training]) -> None:
        expected = train_in_one_process(config_name, in_one_process(variant))
        assert_same_training(variant, answers[0], expected, MODEL_TOLERANCE)

    where = f"model {config_name} {variant.name}"
    report.run(where, lambda: train(config_name, variant), check)


if __name__ == "__main__":
    sys.exit(main())
