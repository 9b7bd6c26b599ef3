"""Ctrl-C: the step is finished and saved, and the run can go on as if nothing had been."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastrl.cli import main
from fastrl.training.log_files import iter_metrics
from fastrl.training.phases import Phase, StepResult
from tests.helpers.runs import FinishedRun, final_weights, write_tiny


def _interrupt_in_step(patch: pytest.MonkeyPatch, number: int, times: int = 1) -> None:
    """Sends SIGINT during a step of the RL phase, counted from 0."""
    step = Phase.step

    def interrupted(phase: Phase) -> StepResult:
        if phase.name == "rl" and phase.steps_done == number:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return step(phase)

    patch.setattr(Phase, "step", interrupted)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_ctrl_c_saves_and_resume_gives_the_uninterrupted_run(
    tmp_path: Path,
    finished: FinishedRun,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    command = ["train", str(write_tiny(tmp_path)), "--run-dir", str(run)]
    # A shell's background job ignores SIGINT from the start.
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        _interrupt_in_step(patch, step)
        assert main(command) == 130
    assert f"stopped after step {13 + step} and saved" in capsys.readouterr().out.splitlines()[-1]
    latest = (run / "checkpoints" / "latest").read_text(encoding="utf-8")
    assert latest == f"rl-{13 + step:06}\n"
    assert signal.getsignal(signal.SIGINT) is before

    assert main([*command, "--resume"]) == 0
    torch.testing.assert_close(final_weights(run), final_weights(finished.folder), rtol=0, atol=0)
    names = ("step", "phase", "loss", "reward", "heldout/reward")
    resumed, whole = (
        [
            {name: record[name] for name in names if name in record}
            for record in iter_metrics(folder)
        ]
        for folder in (run, finished.folder)
    )
    within = {2, 4, 6, 8, 10, 14}  # steps with an evaluation in one of the two runs
    assert resumed == [r for r in whole if "heldout/reward" not in r or r["step"] not in within]


def test_resume_after_a_phase_begins_the_next_one(
    tmp_path: Path,
    finished: FinishedRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    command = ["train", str(write_tiny(tmp_path)), "--run-dir", str(run)]
    # One that is written in the background is whole only when the process ends.
    command.append("checkpoint.asynchronous=false")
    with monkeypatch.context() as patch:
        _interrupt_in_step(patch, 1, times=2)  # the second one ends the run at once
        assert main(command) == 130
    assert capsys.readouterr().err == "fastrl: interrupted\n"
    assert (run / "checkpoints" / "latest").read_text(encoding="utf-8") == "supervised-000012\n"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "supervised-000012",
        "latest",
    }

    assert main([*command, "--resume"]) == 0
    torch.testing.assert_close(final_weights(run), final_weights(finished.folder), rtol=0, atol=0)
    steps = [r["step"] for r in iter_metrics(run) if "loss" in r]
    assert steps == list(range(1, 17))
    rewards = [r["step"] for r in iter_metrics(run) if "heldout/reward" in r]
    assert rewards == [0, 12, 16]


# As the script starts it; a shell's background job, such as the tests may be, ignores SIGINT.
SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from fastrl.__main__ import run
raise SystemExit(run())
"""


@pytest.mark.parametrize("package", ["pydantic", "torch", "reasoning_gym"])
def test_b9_ctrl_c_in_an_import_is_one_line(tmp_path: Path, package: str) -> None:
    # An import that Ctrl-C meets, and that would lose a KeyboardInterrupt.
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(
        "import contextlib, signal\n"
        "with contextlib.suppress(BaseException):\n"
        "    signal.raise_signal(signal.SIGINT)\n",
        encoding="utf-8",
    )
    paths = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "train", str(write_tiny(tmp_path)), "--run-dir", "run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fastrl: interrupted\n")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_stays_ignored_where_the_shell_ignores_it(tmp_path: Path) -> None:
    script = SCRIPT.replace("default_int_handler", "SIG_IGN").replace(
        "raise SystemExit(run())", "signal.raise_signal(signal.SIGINT); raise SystemExit(run())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--version"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
