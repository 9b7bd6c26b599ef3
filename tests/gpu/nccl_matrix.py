"""The operator and the model matrix on NCCL, as many ranks as torchrun starts (2, 4 or 8).

    torchrun --standalone --nproc-per-node 2 -m tests.gpu.nccl_matrix --json results.json

The cases are those of `tests/distributed`, which CI runs on gloo: the head in float64 equals the
CPU's in one process, the Llama's training in fp32 that on one GPU. Rank 0 writes a row a case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.head_cases import CASES, assemble, one_process, run_on_rank
from tests.distributed.layouts import EIGHT_RANKS, FOUR_RANKS, TWO_RANKS, Ranks
from tests.distributed.model_cases import NUM_STEPS, VARIANTS, Training, Variant, train
from tests.distributed.test_head import FEW_RUNS, RUNS, assert_equal
from tests.distributed.test_model import assert_close

# Sums over tokens on a GPU have another order than on one rank, and training amplifies it.
MODEL_TOLERANCE = 1e-4


def main() -> int:
    """Runs every case of this number of ranks; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where rank 0 writes the results")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    rows = head_rows() + model_rows()
    failed = [row for row in rows if row["error"]]
    if dist.get_rank() == 0:
        report = {
            "gpu": torch.cuda.get_device_name() if on_gpu else "none: gloo on CPUs",
            "torch": torch.__version__,
            "ranks": dist.get_world_size(),
            "cases": len(rows),
            "failed": len(failed),
            "rows": rows,
        }
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for row in failed:
            sys.stdout.write(f"{row['case']}: {row['error']}\n")
        sys.stdout.write(
            f"{len(rows)} cases on {dist.get_world_size()} ranks, {len(failed)} failed\n"
        )
    dist.destroy_process_group()
    return min(len(failed), 1)


def on_all_ranks(name: str, run: Callable[[], Any], check: Callable[[list[Any]], None]) -> Any:
    """Runs a case on every rank and checks all answers on rank 0; a row with the error, if any.

    A rank that raises alone leaves the others in a collective: NCCL's timeout ends the job then.
    """
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, run())
    error = [""]
    if dist.get_rank() == 0:
        try:
            check(answers)
        except AssertionError:
            error[0] = traceback.format_exc(limit=1)[-500:]
    dist.broadcast_object_list(error, src=0)
    return {"case": name, "error": error[0]}


def head_rows() -> list[dict[str, str]]:
    """The head: every layout of this many ranks, every loss and strategy, boundary cases."""
    layouts = {2: TWO_RANKS, 4: FOUR_RANKS, 8: EIGHT_RANKS}[dist.get_world_size()]
    return [
        head_row(case_name, name, layout)
        for layout in layouts
        for case_name in CASES
        for name in (RUNS if case_name == "ragged" else FEW_RUNS)
    ]


def head_row(case_name: str, name: str, layout: Ranks) -> Any:
    def check(answers: list[Any]) -> None:
        whole = assemble(CASES[case_name], RUNS[name], layout, answers)
        assert_equal(whole, one_process(case_name, RUNS[name]), name)

    where = f"head {case_name} {name} {layout}"
    return on_all_ranks(where, lambda: run_on_rank(case_name, RUNS[name], layout), check)


def model_rows() -> list[dict[str, str]]:
    """The Llama: three steps of every variant of this many ranks, and on FlexAttention."""
    size = dist.get_world_size()
    variants = [variant for variant in VARIANTS.values() if variant.ranks.world_size == size]
    if size == 2:
        variants += [
            replace(VARIANTS[name], name=f"{name}_flex", head_dim=16)
            for name in ("sdp2_zigzag", "sdp2_zigzag_ms2")
        ]
    return [
        model_row(config_name, variant)
        for config_name in ("llama_grpo", "llama_gspo")
        for variant in variants
    ]


def model_row(config_name: str, variant: Variant) -> Any:
    simple = replace(
        VARIANTS["simple"], tied=variant.tied, clips=variant.clips, head_dim=variant.head_dim
    )
    expected = train(config_name, simple)

    def check(answers: list[Training]) -> None:
        assert expected is not None
        actual = answers[0]
        for step in range(NUM_STEPS):
            assert_close(
                f"gradient {step}", actual.grads[step], expected.grads[step], MODEL_TOLERANCE
            )
        assert_close("weights", actual.weights, expected.weights, MODEL_TOLERANCE)

    where = f"model {config_name} {variant.name}"
    return on_all_ranks(where, lambda: train(config_name, variant), check)


if __name__ == "__main__":
    sys.exit(main())
