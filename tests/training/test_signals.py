"""Signals that stop a run, and the folder that only one process writes to."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastrl.cli import main
from fastrl.config import ConfigError, UserError
from fastrl.environments.pool import ScoringPool
from fastrl.environments.problem_sets import draw_problem_sets
from fastrl.environments.scoring import build_environment
from fastrl.training.interrupt import StopRequest
from fastrl.training.phases import Phase, StepResult
from fastrl.training.run_folder import RunFolder
from tests.helpers.runs import FinishedRun, final_weights, tiny, write_tiny


def _in_step(patch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Acts at the beginning of a step of the RL phase, counted from 0."""
    step = Phase.step

    def acting(phase: Phase) -> StepResult:
        if phase.name == "rl" and phase.steps_done == number:
            act()
        return step(phase)

    patch.setattr(Phase, "step", acting)


def _latest(run: Path) -> str:
    return (run / "checkpoints" / "latest").read_text(encoding="utf-8")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_rl15_sigterm_and_sighup_save(
    tmp_path: Path,
    finished: FinishedRun,
    number: signal.Signals,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    command = ["train", str(write_tiny(tmp_path)), "--run-dir", str(run)]
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        _in_step(patch, 1, lambda: signal.raise_signal(number))
        assert main(command) == code
    assert signal.getsignal(number) is before
    assert "stopped after step 14 and saved" in capsys.readouterr().out.splitlines()[-1]
    assert _latest(run) == "rl-000014\n"

    assert main([*command, "--resume"]) == 0
    torch.testing.assert_close(final_weights(run), final_weights(finished.folder), rtol=0, atol=0)


@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_rl15_the_second_signal_ends_the_run_at_once(
    tmp_path: Path,
    second: signal.Signals,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(second)

    run = tmp_path / "run"
    _in_step(monkeypatch, 1, twice)
    # One that is written in the background is whole only when the process ends.
    overrides = ["phases.0.steps=2", "checkpoint.asynchronous=false"]
    assert main(["train", str(write_tiny(tmp_path)), "--run-dir", str(run), *overrides]) == code
    assert capsys.readouterr().err == "fastrl: interrupted\n"
    assert _latest(run) == "supervised-000002\n"


def test_rl15_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(lambda: None) as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.number == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_rl15_scoring_workers_outlive_the_signals_of_a_scheduler() -> None:
    config = tiny().environment
    assert config is not None
    problem = draw_problem_sets(config, build_environment(config, 3)).heldout[0]
    pool = ScoringPool(config, 3)
    pool.set_probe(problem)
    pool.start()
    try:
        (worker,) = pool._workers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(worker._process.pid, number)
        outcomes = pool.score([problem], ["0"])
        assert (outcomes.failures, pool._workers) == (set(), [worker])
    finally:
        pool.close()


def test_rl18_a_second_process_is_refused(
    tmp_path: Path, finished: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = ["train", str(finished.config), "--run-dir", str(run)]
    holder = f"in use by process {os.getpid()} on host {re.escape(socket.gethostname())};"
    with RunFolder(run, writes=True) as folder:
        assert main(command) == 2
        assert re.search(holder, capsys.readouterr().err)
        assert [path.name for path in run.iterdir()] == [".lock"]
        folder.check()
    shutil.rmtree(run)
    shutil.copytree(finished.folder, run)
    (run / "checkpoints" / "latest").write_text("supervised-000012\n", encoding="utf-8")
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    overrides = ["logging.tensorboard=true", "logging.report=true", "evaluation.every=2"]
    with RunFolder(run, writes=True):
        assert main([*command, "--resume", *overrides]) == 2
        assert re.search(holder, capsys.readouterr().err)
    del files[run / ".lock"]
    assert all(path.read_bytes() == content for path, content in files.items())


def test_rl18_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from fastrl.training.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1]), writes=True):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(99)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on host"):
        RunFolder(tmp_path, writes=True).__enter__()
    holder.kill()
    holder.communicate()
    with RunFolder(tmp_path, writes=True):
        pass


def _replaced(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


REMOVALS: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "moved": lambda run: run.rename(run.with_name("elsewhere")),
    "replaced": _replaced,
    "metrics": lambda run: (run / "metrics.jsonl").unlink(),
}


@pytest.mark.parametrize("name", REMOVALS)
def test_rl18_a_folder_that_is_gone_is_not_made_anew(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    _in_step(monkeypatch, 1, lambda: REMOVALS[name](run))
    # A checkpoint in the background may be the first to miss it.
    overrides = ["phases.0.steps=1", "checkpoint.asynchronous=false"]
    assert main(["train", str(write_tiny(tmp_path)), "--run-dir", str(run), *overrides]) == 2
    error = capsys.readouterr().err
    assert f"{run / 'metrics.jsonl'}: must stay in its place while the run trains, but" in error
    left = sorted(path.name for path in run.iterdir()) if run.exists() else None
    kept = [".lock", "checkpoints", "config.yaml", "samples.jsonl"]
    assert left == {"replaced": [], "metrics": kept}.get(name)


def test_rl18_a_checkpoint_does_not_make_the_folder_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def gone(_: Phase) -> bool:  # between the last record and the checkpoint
        shutil.rmtree(run)
        return True

    monkeypatch.setattr(Phase, "has_finite_weights", gone)
    overrides = ["phases.0.steps=1"]
    assert main(["train", str(write_tiny(tmp_path)), "--run-dir", str(run), *overrides]) == 2
    assert "the checkpoint cannot be written: No such file or directory" in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.timeout=60"], "`timeout` must be given for several processes only"),
        (["parallel.data=2", "parallel.timeout=0.5"], "parallel.timeout"),
        (["parallel.data=2", "parallel.timeout=1e9"], "parallel.timeout"),
    ],
)
def test_rl16_a_timeout_without_effect_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        tiny(*overrides)


WATCHED = """
import re, sys, time
from fastrl.training import watch
watch._SECONDS_FOR_THE_THREAD = 0.5

def hanging():
    if sys.argv[1] == "sleeps":
        time.sleep(60)
    else:
        re.match("(a?){40}a{40}", "a" * 40)  # holds the interpreter

w = watch.Watch(1.0, "rank 1 of 2")
for _ in range(3):
    time.sleep(0.6)
    w.progress()
hanging()
"""


@pytest.mark.parametrize("how", ["sleeps", "holds"])
def test_rl16_a_process_without_progress_ends_with_its_stack(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, how], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.count("hanging") == 1
    first = "fastrl: error: rank 1 of 2 made no progress for 1 s (`parallel.timeout`), so"
    assert done.stderr.startswith(first if how == "sleeps" else "Timeout (0:00:01.5")
