"""The speed of `fastrl train` itself on rollout documents, for `benchmarks.update_bars`."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.update import times_of_kernels
from fastrl.config import RunConfig, parse_config
from fastrl.data.documents import Document
from fastrl.data.rollouts import write_rollouts
from fastrl.training.phases import Phase, StepResult
from fastrl.training.run import train
from fastrl.training.saving import CheckpointSaver

TIMED, PROFILED = 4, 2
"""Steps, after two that compile and one that fills the allocator."""


def run_config(
    model: dict[str, Any],
    documents: Sequence[Document],
    max_tokens: int,
    attention: str,
    file: Path,
) -> RunConfig:
    """A run whose every step is an update on all documents: fp32 states, bf16 products."""
    on_gpu = torch.cuda.is_available()
    parallel: dict[str, Any] = {}
    if on_gpu:
        parallel = {
            "fully_sharded": True,
            "compute_dtype": "bfloat16",
            "reshard_after": "update",
        }
    sizes = {**model, "max_position_embeddings": 131072, "attention_implementation": attention}
    phase = {
        "type": "rl",
        "steps": 3 + TIMED + PROFILED,
        "losses": {"policy": {"type": "grpo"}},
        "rollouts": {
            "type": "files",
            "paths": [str(file)],
            "documents_per_step": len(documents),
        },
        "max_tokens_per_micro_batch": max_tokens,
        "optimizer": {"learning_rate": 1e-6},
    }
    values = {
        "model": {"type": "llama", **sizes},
        "dtype": "float32",
        "compile": on_gpu,
        "parallel": parallel,
        "checkpoint": {"every": None},
        "logging": {"tensorboard": False, "report": False},
        "phases": [phase],
    }
    return parse_config(RunConfig, values)


def train_row(
    model: dict[str, Any], documents: Sequence[Document], max_tokens: int, attention: str
) -> dict[str, Any]:
    """Tokens a second of the run's own log, and a step's milliseconds of kernels by kind.

    The steps that are profiled come after those that are timed. No checkpoint is written.
    """
    is_profiled = torch.cuda.is_available()
    step = Phase.step
    recorder = profile(activities=[ProfilerActivity.CUDA])

    def observed(phase: Phase) -> StepResult:
        if is_profiled and phase.steps_done == 3 + TIMED:
            torch.cuda.synchronize()
            recorder.start()
        return step(phase)

    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder) / "rollouts.jsonl", Path(folder) / "run"
        write_rollouts(file, documents)
        config = run_config(model, documents, max_tokens, attention, file)
        with (
            patch.object(Phase, "step", observed),
            patch.object(Phase, "has_finite_weights", return_value=True),
            patch.object(CheckpointSaver, "save"),
        ):
            train(config, run)
        if is_profiled:
            torch.cuda.synchronize()
            recorder.stop()
        lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    speeds = [json.loads(line)["tokens_per_second"] for line in lines][3 : 3 + TIMED]
    speed = statistics.median(speeds)
    row: dict[str, Any] = {"tokens_per_second": round(speed), "speeds": speeds}
    if is_profiled:
        kinds = times_of_kernels(recorder)
        row["kernels_ms"] = {kind: round(value / PROFILED, 1) for kind, value in kinds.items()}
        tokens = sum(len(document.tokens) for document in documents)
        row["kernels_ms"]["wall"] = round(1e3 * tokens / speed, 1)
    return row
