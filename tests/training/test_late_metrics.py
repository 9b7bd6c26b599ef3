"""Steps whose numbers are read when the next one is launched: the same run, the same lines."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.cli import main
from fastrl.config import UserError
from fastrl.training import run as running
from fastrl.training.log_files import MetricsWriter
from fastrl.training.phases import Phase, StepResult
from tests.helpers.poisoned import poison
from tests.helpers.runs import final_weights, write_tiny

FEW = [
    *("phases.0.steps=6", "phases.0.documents_per_step=4", "phases.1.steps=2"),
    *("phases.1.rollouts.prompts_per_step=2", "environment.heldout_prompts=2"),
    *("environment.train_prompts=20", "checkpoint.every=4"),
]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run does, in order: steps that begin, lines that are written."""
    found: list[str] = []
    step, log = Phase.step, MetricsWriter.log

    def begun(phase: Phase) -> StepResult:
        found.append(f"{phase.name} {phase.steps_done + 1}")
        return step(phase)

    def logged(writer: MetricsWriter, step: int, phase: str, values: Mapping[str, float]) -> None:
        found.append(f"line {step}")
        log(writer, step, phase, values)

    monkeypatch.setattr(Phase, "step", begun)
    monkeypatch.setattr(MetricsWriter, "log", logged)
    return found


def _train(folder: Path, name: str, *overrides: str, code: int = 0) -> list[dict[str, Any]]:
    """The lines of a run, without its times."""
    config = str(write_tiny(folder))
    command = ["train", config, "--run-dir", str(folder / name)]
    assert main([*command, *(overrides or FEW)]) == code
    lines = (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()
    timed = ("seconds", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


def _read_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running, "_runs_ahead", lambda device: True)


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_lines_and_weights_are_those_of_a_run_that_reads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    at_once = _train(tmp_path, "at_once")
    of_the_first, events[:] = list(events), []
    _read_late(monkeypatch)
    assert _train(tmp_path, "late") == at_once
    assert _equal(final_weights(tmp_path / "late"), final_weights(tmp_path / "at_once"))
    # Before the checkpoint after step 4 and at the end of the phase nothing is left to read.
    assert events[:13] == [
        *("line 0", "supervised 1", "supervised 2", "line 1", "supervised 3", "line 2"),
        *("supervised 4", "line 3", "line 4", "supervised 5", "supervised 6", "line 5", "line 6"),
    ]
    # A step that samples begins when all lines before it are there.
    assert events[13:] == of_the_first[13:]


def test_a_stopped_run_has_the_line_of_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*FEW, "evaluation.every=2"]  # whose line is behind that of its step
    whole = _train(tmp_path, "whole", *overrides)
    _read_late(monkeypatch)
    step = Phase.step

    def stopped(phase: Phase) -> StepResult:
        if phase.steps_done == 2 and phase.name == "supervised":
            signal.raise_signal(signal.SIGTERM)
        return step(phase)

    with monkeypatch.context() as patch:
        patch.setattr(Phase, "step", stopped)
        lines = _train(tmp_path, "stopped", *overrides, code=143)
    assert lines == whole[: len(lines)]
    assert lines[-1]["step"] == 3
    assert _train(tmp_path, "stopped", *overrides, "--resume") == whole
    assert _equal(final_weights(tmp_path / "stopped"), final_weights(tmp_path / "whole"))


def test_a_step_that_raises_leaves_the_line_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _read_late(monkeypatch)
    step = Phase.step

    def failing(phase: Phase) -> StepResult:
        if phase.steps_done == 2:
            raise UserError("no documents")
        return step(phase)

    monkeypatch.setattr(Phase, "step", failing)
    assert _train(tmp_path, "run", code=2)[-1]["step"] == 2


@pytest.mark.parametrize("bad", [[2], [5]])
def test_the_step_that_failed_is_named(
    bad: Sequence[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _read_late(monkeypatch)
    poison(monkeypatch, set(bad))
    overrides = [*FEW, "phases.0.optimizer.max_skipped_updates=0"]
    lines = _train(tmp_path, "run", *overrides, code=2)
    assert f"step {bad[0] + 1} (phase `supervised`): grad_norm must be" in capsys.readouterr().err
    assert lines[-1]["step"] == bad[0]
