"""Checkpoints in the background: those of a run that waits for them, and no failure is lost."""

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.training import checkpoint, tensor_files
from fastrl.training.checkpoint import latest_checkpoint
from fastrl.training.log_files import iter_metrics
from fastrl.training.manifest import write_manifest
from fastrl.training.model import ModelFiles
from fastrl.training.phases import Phase, StepResult
from fastrl.training.saving import CheckpointSaver
from fastrl.training.trainer_state import TrainerState
from tests.helpers.runs import write_tiny

OVERRIDES = [
    *("environment.heldout_prompts=4", "checkpoint.every=2", "checkpoint.keep=9"),
    *("phases.0.steps=6", "phases.0.documents_per_step=4", "phases.1.steps=4"),
    "phases.1.losses.policy={type: grpo, kl: {coefficient: 0.1}}",
]


def _command(folder: Path, name: str, *overrides: str) -> list[str]:
    config = str(write_tiny(folder))
    return ["train", config, "--run-dir", str(folder / name), *OVERRIDES, *overrides]


def _hold_writes(patch: pytest.MonkeyPatch, last: int) -> list[int]:
    """Lets each write end only when a step after its own is made, but that of step `last`.

    Returns:
        Steps that were made during each write; it grows.
    """
    step, save = Phase.step, CheckpointSaver.save
    made, saved, during_writes = [0], [0], []
    changed = threading.Condition()

    def counted(phase: Phase) -> StepResult:
        result = step(phase)
        with changed:
            made[0] += 1
            changed.notify_all()
        return result

    def noted(saver: CheckpointSaver, model: ModelFiles, state: TrainerState, files: Any) -> None:
        saver.wait()
        saved[0] = state.step
        save(saver, model, state, files)

    def held(*arguments: Any) -> None:
        with changed:
            assert changed.wait_for(lambda: made[0] > saved[0] or saved[0] == last, timeout=60)
        during_writes.append(made[0] - saved[0])
        write_manifest(*arguments)

    patch.setattr(Phase, "step", counted)
    patch.setattr(CheckpointSaver, "save", noted)
    patch.setattr(checkpoint, "write_manifest", held)
    return during_writes


def _contents(run: Path) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    for file in sorted((run / "checkpoints").rglob("*")):
        name = str(file.relative_to(run))
        if file.name == "progress.json":
            contents[name] = json.loads(file.read_text("utf-8")) | {"seconds": 0}
        elif file.is_file() and file.name != "manifest.json":
            contents[name] = file.read_bytes()
    return contents


def test_checkpoints_are_those_of_a_run_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(_command(tmp_path, "waits", "checkpoint.asynchronous=false")) == 0
    during_writes = _hold_writes(monkeypatch, last=10)
    assert main(_command(tmp_path, "goes_on")) == 0
    assert len(during_writes) == 5
    assert min(during_writes[:4]) >= 1
    waited = _contents(tmp_path / "waits")
    assert len([name for name in waited if "optimizer" in name]) == 5
    assert _contents(tmp_path / "goes_on") == waited


def _fail_after(patch: pytest.MonkeyPatch, number: int) -> None:
    """Manifests from `number` on, counted from 0, cannot be written."""
    written: list[None] = []

    def fail(*arguments: Any) -> None:
        written.append(None)
        if len(written) > number:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_manifest(*arguments)

    patch.setattr(checkpoint, "write_manifest", fail)


def test_a_failed_write_ends_the_run_soon_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fail_after(monkeypatch, 1)
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    overrides = ("phases.0.steps=1000", "checkpoint.every=100")
    assert main(_command(tmp_path, "run", *overrides)) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"fastrl: error: {checkpoints / 'supervised-000200'}: the checkpoint cannot be written: "
        "No space left on device; the run ends here, and the checkpoints before are as they were"
    )
    assert error.count("\n") == 1
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "supervised-000100"}
    assert latest_checkpoint(run).name == "supervised-000100"
    assert 200 <= [*iter_metrics(run)][-1]["step"] < 300


def test_an_error_of_the_run_waits_for_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, write = Phase.step, tensor_files._write_at
    has_ended = threading.Event()

    def fails(phase: Phase) -> StepResult:
        if phase.steps_done == 2:
            has_ended.set()
            raise OSError(errno.EIO, "Input/output error")
        return step(phase)

    def slow(handle: int, content: memoryview, offset: int) -> None:
        assert has_ended.wait(20)
        write(handle, content, offset)

    monkeypatch.setattr(Phase, "step", fails)
    monkeypatch.setattr(tensor_files, "_write_at", slow)
    assert main(_command(tmp_path, "run")) == 2
    assert capsys.readouterr().err == "fastrl: error: Input/output error\n"
    assert latest_checkpoint(tmp_path / "run").name == "supervised-000002"

    _fail_after(monkeypatch, 0)
    has_ended.clear()
    assert main(_command(tmp_path, "other")) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "fastrl: error: [Errno 5] Input/output error"
    assert "supervised-000002: the checkpoint cannot be written: No space left" in second
