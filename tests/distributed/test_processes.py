"""The processes of a job: signals, a rank that hangs, a torchrun that is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import torchrun
from tests.helpers.runs import write_tiny

OVERRIDES = ["parallel.data=2", "phases.0.steps=100000", "phases.0.optimizer.schedule=constant"]
OVERRIDES += ["phases.0.optimizer.warmup_updates=0"]
IDS = "import os, sys; open(sys.argv.pop(1) + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
SCRIPT = IDS + "from fastrl.__main__ import run\nsys.exit(run())\n"


class Job:
    """A run of two ranks under torchrun that trains until it is ended."""

    def __init__(self, folder: Path, *overrides: str, forks: bool = False) -> None:
        self.run = folder / "run"
        self._ids = folder / "rank"
        script = folder / "job.py"
        script.write_text(SCRIPT, encoding="utf-8")
        arguments = [str(script), str(self._ids)]
        arguments += ["train", str(write_tiny(folder)), "--run-dir", str(self.run)]
        arguments += [*OVERRIDES, *overrides]
        self.torchrun: torchrun.Job | subprocess.Popen[str]
        if forks and torchrun.FORKS:
            self.torchrun = torchrun.Job(folder, 2, *arguments)
            return
        self.torchrun = subprocess.Popen(
            torchrun.command(2, *arguments),
            **torchrun.environment(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def ranks(self) -> list[int]:
        return [int(Path(f"{self._ids}{rank}").read_text("utf-8")) for rank in (0, 1)]

    def steps(self) -> list[int]:
        file = self.run / "metrics.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = text.splitlines(keepends=True)
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def wait_for(self, is_so: Callable[[], bool], seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.1)

    def kill(self) -> None:
        for pid in (self.torchrun.pid, *self.ranks):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.torchrun.communicate()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def started(*overrides: str, forks: bool = False) -> Job:
        jobs.append(Job(tmp_path, *overrides, forks=forks))
        jobs[0].wait_for(lambda: len(jobs[0].steps()) > 3 or jobs[0].torchrun.poll() is not None)
        if jobs[0].torchrun.poll() is not None:
            pytest.fail(jobs[0].torchrun.communicate()[1])
        return jobs[0]

    yield started
    for job in jobs:
        job.kill()


def test_rl15_all_ranks_stop_after_the_same_step(start: Callable[..., Job]) -> None:
    job = start()
    os.kill(job.torchrun.pid, signal.SIGTERM)
    out, _ = job.torchrun.communicate(timeout=240)
    assert job.torchrun.returncode != 0
    last = job.steps()[-1]
    assert f"stopped after step {last} and saved; go on with --resume" in out
    latest = (job.run / "checkpoints" / "latest").read_text(encoding="utf-8")
    assert latest == f"supervised-{last:06}\n"


def test_rl16_a_rank_that_hangs_ends_the_job(start: Callable[..., Job]) -> None:
    job = start("parallel.timeout=8", "checkpoint.every=2", forks=True)
    job.wait_for((job.run / "checkpoints" / "latest").exists)  # written in the background
    os.kill(job.ranks[1], signal.SIGSTOP)
    job.wait_for(lambda: not is_running(job.ranks[0]))
    os.kill(job.ranks[1], signal.SIGKILL)  # the agent would do so after half a minute
    _, error = job.torchrun.communicate(timeout=240)
    assert job.torchrun.returncode != 0
    message = "fastrl: error: rank {} of 2 made no progress for 8 s (`parallel.timeout`)"
    assert message.format(0) in error
    assert message.format(1) not in error
    stack = error.split(message.format(0))[1]
    # In the step, or where ranks agree before and after it.
    assert "fastrl/training/run.py" in stack
    assert "torch/distributed/" in stack
    assert not any(is_running(pid) for pid in job.ranks)
    assert (job.run / "checkpoints" / "latest").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rl17_ranks_end_with_torchrun(start: Callable[..., Job]) -> None:
    job = start()
    os.kill(job.torchrun.pid, signal.SIGKILL)
    job.wait_for(lambda: job.torchrun.poll() is not None)
    job.wait_for(lambda: not any(is_running(pid) for pid in job.ranks), seconds=20)
    size = (job.run / "metrics.jsonl").stat().st_size
    time.sleep(0.5)
    assert (job.run / "metrics.jsonl").stat().st_size == size
