"""Jobs of forked ranks, supervised as torchrun does it, from a process that has loaded torch."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from fastrl.__main__ import run

_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_SECONDS_OF_GRACE = 1.0
_SECONDS_STOPPED = 0.05

Prepare = Callable[[int], None]


@dataclass
class Ended:
    """A job that has ended.

    Attributes:
        codes: exit codes by rank, negative for signals; SIGTERM or SIGKILL of ranks that were ended
            because another had failed are among them.
        out: what the ranks wrote to stdout, one after the other.
        err: the same of stderr.
        first: rank that ended first.
    """

    codes: list[int]
    out: str
    err: str
    first: int


@dataclass
class _Ranks:
    left: dict[int, int]  # rank by process id
    codes: list[int]
    first: int | None = None
    killed_at: float | None = None
    stopped: dict[int, float] = field(default_factory=dict)


def run_job(
    arguments: Sequence[str], num_ranks: int, prepare: Prepare, folder: Path, *, limit: float = 60
) -> Ended:
    """Runs the command on forked ranks and waits for the last of them, and of their children.

    When a rank fails, the others get SIGTERM and after a grace period SIGKILL. A process that is
    stopped and alone is continued.

    Args:
        arguments: of the command.
        num_ranks: of the job.
        prepare: called on each rank before the command, to set a fault.
        folder: for what the ranks write.
        limit: seconds after which the job counts as hanging.

    Raises:
        AssertionError: it hangs, or has left a process.
    """
    # Processes that lose their parent become children of this one, which then sees them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    port = _free_port()
    left = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
            variables |= {"WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
            _be_rank(arguments, variables, prepare, folder)
        left[pid] = rank
    ranks = _Ranks(left, [0] * num_ranks)
    end = time.monotonic() + limit
    while ranks.left:
        _look(ranks)
        hangs = time.monotonic() > end
        if hangs:
            for pid in ranks.left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.004)
    _assert_no_children()
    out, err = (
        "".join((folder / f"{name}{rank}").read_text("utf-8") for rank in range(num_ranks))
        for name in ("out", "err")
    )
    assert time.monotonic() < end, f"the job hangs: {err}"
    assert ranks.first is not None
    return Ended(ranks.codes, out, err, ranks.first)


def _free_port() -> int:
    """A port below those that the system gives out by itself, which could take it before rank 0."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as bound, contextlib.suppress(OSError):
            bound.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def _be_rank(
    arguments: Sequence[str],
    variables: dict[str, str],
    prepare: Prepare,
    folder: Path,
) -> NoReturn:
    code = 1
    try:
        for name, number in (("out", 1), ("err", 2)):
            file = os.open(folder / f"{name}{variables['RANK']}", os.O_CREAT | os.O_WRONLY, 0o600)
            os.ftruncate(file, 0)
            os.dup2(file, number)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), "utf-8", write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), "utf-8", write_through=True)
        faulthandler.enable(2)  # pytest's writes to the terminal
        os.environ.update(variables)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["fastrl", *arguments]
        prepare(int(variables["RANK"]))
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _look(ranks: _Ranks) -> None:
    """Takes the ranks that have ended, and ends the others after the first that failed."""
    now = time.monotonic()
    for pid, rank in list(ranks.left.items()):
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if not found:
            continue
        if os.WIFSTOPPED(status):
            ranks.stopped[pid] = now
            continue
        del ranks.left[pid]
        ranks.stopped.pop(pid, None)
        ranks.codes[rank] = os.waitstatus_to_exitcode(status)
        ranks.first = rank if ranks.first is None else ranks.first
        if ranks.codes[rank] and ranks.killed_at is None:
            ranks.killed_at = now + _SECONDS_OF_GRACE
            _send(ranks.left, signal.SIGTERM)
    if ranks.killed_at is not None and now > ranks.killed_at:
        _send(ranks.left, signal.SIGKILL)
    if len(ranks.codes) == 1:
        for pid, since in list(ranks.stopped.items()):
            if now > since + _SECONDS_STOPPED:
                del ranks.stopped[pid]
                os.kill(pid, signal.SIGCONT)


def _send(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _assert_no_children() -> None:
    end = time.monotonic() + 3
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text("utf-8").split()
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    raise AssertionError(f"processes are left: {children}")
