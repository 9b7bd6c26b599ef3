"""The scripts for machines with several GPUs, under torchrun on gloo: they run, and all holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import Span, nccl_spans
from tests.helpers.torchrun import torchrun

MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def rows_of(file: Path, *arguments: str) -> list[dict[str, Any]]:
    done = torchrun(2, *arguments, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["ranks"] == 2
    assert report["torch"]
    rows: list[dict[str, Any]] = report["rows"]
    return rows


def test_the_model_matrix_under_torchrun(tmp_path: Path) -> None:
    """A part of it; `test_model.py` has every variant."""
    variants = ("dp2", "sdp2_zigzag", "stp2", "tp2_novp", "fsdp2")
    options = ("--parts", "model", "--variants", ",".join([*variants, "simple"]))
    rows = rows_of(tmp_path / "matrix.json", "tests.gpu.nccl_matrix", *options)
    assert {row["error"] for row in rows} == {""}
    assert [row["case"] for row in rows] == [
        f"model {config} {variant}"
        for variant in variants
        for config in ("llama_grpo", "llama_gspo")
    ]


def test_the_scaling_of_the_head(tmp_path: Path) -> None:
    options = ("--shape", "tiny", "--losses", "grpo", "--strategies", "auto", "--warmup", "0")
    rows = rows_of(tmp_path / "scaling.json", "benchmarks.scaling", *options)
    assert [row["layout"] for row in rows] == ["dW all-reduce", "one_gpu", "tp_sp", "tp", "sdp"]
    for row in rows[1:]:
        assert row["ran"] == "single_pass"
        assert row["gate"] < 1e-2
        assert row.keys() >= {"time_ms", "nccl_share", "exposed_share"}
    assert all(row["speedup"] > 0 for row in rows[2:])
    # Out of time: rows that say so, and an exit code.
    file = tmp_path / "late.json"
    late = torchrun(2, "benchmarks.scaling", *options, "--seconds", "0", "--json", str(file))
    assert late.returncode != 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row.get("error") for row in rows] == [None, *["not begun within 0 s"] * 4]


def test_time_of_nccl_is_counted_between_the_marks() -> None:
    kernels = [
        Span("ncclDevKernel_barrier".lower(), 0.0, 100.0),
        Span(MARK, 100.0, 101.0),
        Span("gemm", 110.0, 150.0),
        Span("nccldevkernel_allgather", 140.0, 170.0),
        Span("gemm", 180.0, 190.0),
        Span(MARK, 195.0, 196.0),
        Span("nccldevkernel_barrier", 200.0, 300.0),
        Span(MARK, 300.0, 301.0),
        Span("gemm", 302.0, 310.0),
        Span(MARK, 311.0, 312.0),
    ]
    assert nccl_spans(kernels) == [(30.0, 20.0), (0.0, 0.0)]
    with pytest.raises(AssertionError, match="marks"):
        nccl_spans([])
