"""A module on several processes, under torchrun's own agent.

The agent and its ranks are forks of this process, which has loaded torch; new interpreters would
spend most of a test on imports. `test_processes.py` starts torchrun as users do.
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

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.helpers.killed_runs import start_child

ROOT = Path(__file__).parent.parent.parent
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
    for name in _IMPORTS:
        importlib.import_module(name)
    job = [module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        agent = start_child(partial(_be_agent, num_processes, job, max_restarts, err), out)
        code = _wait(agent)
        texts = [file.read_text(encoding="utf-8") for file in (out, err)]
    return subprocess.CompletedProcess(job, code, *texts)


def _wait(agent: int) -> int:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(agent, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    raise AssertionError(f"the job hangs for {_SECONDS} s")


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
    os.environ["OMP_NUM_THREADS"] = "1"
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
