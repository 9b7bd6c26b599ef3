"""Scoring workers that are forked, where a new interpreter would import everything again.

An import of reasoning-gym takes longer than most runs of tests. What a worker's own process is,
its variables and the bound on its memory, is tested in `tests/environments`, which forks none.
"""

from __future__ import annotations

import gc
import os
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from fastrl.environments import worker, worker_process
from fastrl.environments.fence import limit_memory


class ForkedWorker:
    """What a `WorkerProcess` needs of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_: Any,  # no output, and a group of its own
    ) -> None:
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's waiting threads
            self.pid = os.fork()
        if self.pid == 0:
            _be_worker(command[-2:], stdin, pass_fds[0], env)
        os.setpgid(self.pid, self.pid)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Has this process and those that it forks fork their scoring workers."""
    forked = SimpleNamespace(Popen=ForkedWorker, DEVNULL=subprocess.DEVNULL)
    patch.setattr(worker_process, "subprocess", forked)


def _be_worker(
    arguments: Sequence[str], messages: int, answers: int, variables: Mapping[str, str]
) -> NoReturn:
    code = 1
    try:
        gc.disable()  # what is here is not the worker's to close
        os.setpgid(0, 0)
        os.dup2(messages, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(nowhere, number)
        os.closerange(3, answers)
        os.closerange(answers + 1, 2**20)
        os.environ.clear()
        os.environ.update(variables)
        here = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        gib = here * os.sysconf("SC_PAGE_SIZE") / 2**30
        worker.limit_memory = lambda more: limit_memory(gib + more)  # type: ignore[assignment, attr-defined]
        worker.main(arguments)
        code = 0
    finally:
        os._exit(code)
