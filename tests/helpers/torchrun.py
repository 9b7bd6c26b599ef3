"""A module on several processes, under torchrun's own agent.

The agent and its ranks are forks of this process, which has loaded torch; new interpreters would
spend most of a test on imports. `test_processes.py` starts torchrun as users do; so do all tests
where there is a GPU or no Linux.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.helpers.killed_runs import start_child

ROOT = Path(__file__).parent.parent.parent
# A fork of a process that has used a GPU cannot use it.
FORKS = sys.platform == "linux" and not torch.cuda.is_available()
_SECONDS = 280
# What most jobs import, once instead of on each rank.
_IMPORTS = ("fastrl.training.run", "reasoning_gym", "torch.distributed.tensor.parallel")


def torchrun(
    num_processes: int, module: str, *arguments: str, max_restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """The end of a job.

    Args:
        num_processes: of the job.
        module: to run on each, or the path of a script.
        arguments: of the module.
        max_restarts: of all ranks, after one has failed.

    Returns:
        Output of all processes; `returncode` is 0 or 1, as torchrun's.
    """
    if not FORKS:
        return subprocess.run(
            command(num_processes, module, *arguments, max_restarts=max_restarts),
            **environment(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), num_processes, module, *arguments, max_restarts=max_restarts)
        out, err = job.communicate()
    return subprocess.CompletedProcess([module, *arguments], job.returncode or 0, out, err)


def command(num_processes: int, module: str, *arguments: str, max_restarts: int = 0) -> list[str]:
    """The command that a user types, and that is taken where there is a GPU."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_processes), "--max-restarts", str(max_restarts)),
        *([module] if module.endswith(".py") else ["-m", module]),
        *arguments,
    ]


def environment(**variables: str) -> dict[str, Any]:
    """Folder and variables of its process."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {
        "cwd": ROOT,
        "env": os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | variables,
    }


class Job:
    """The part of `subprocess.Popen` that tests need, of the agent of a job.

    Args:
        folder: for the output.
        num_processes: of the job.
        module: as of `torchrun`.
        arguments: of the module.
        max_restarts: as of `torchrun`.
    """

    def __init__(
        self, folder: Path, num_processes: int, module: str, *arguments: str, max_restarts: int = 0
    ) -> None:
        for name in _IMPORTS:
            importlib.import_module(name)
        self.returncode: int | None = None
        self._files = folder / "out", folder / "err"
        job = partial(_be_agent, num_processes, [module, *arguments], max_restarts, self._files[1])
        self.pid = start_child(job, self._files[0])

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def communicate(self, timeout: float = _SECONDS) -> tuple[str, str]:
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise AssertionError(f"the job hangs for {timeout} s")
        out, err = (file.read_text(encoding="utf-8") for file in self._files)
        return out, err


def _be_agent(num_processes: int, job: list[str], max_restarts: int, err: Path) -> int:
    os.setpgid(0, 0)
    os.dup2(sys.stdout.fileno(), 1)
    sys.stderr = err.open("w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    _drop_sockets()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        run_id=str(uuid.uuid4()),
        monitor_interval=0.05,
        start_method="fork",
    )
    try:
        elastic_launch(config, _be_rank)(job)
    except ChildFailedError:
        traceback.print_exc()
        return 1
    return 0


def _drop_sockets() -> None:
    """Servers of this process's parent are not open here, when they close there."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, int(name))
                os.close(nowhere)


def _be_rank(job: list[str]) -> None:
    """What `python -m` does, in a process that has threads of torch no longer."""
    torch.set_num_threads(1)
    warnings.simplefilter("default")
    sys.argv = list(job)
    try:
        if job[0].endswith(".py"):
            runpy.run_path(job[0], run_name="__main__")
        else:
            runpy.run_module(job[0], run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
