"""Runs in forked children that are killed at a file operation, which takes a fraction of a second.

Operations are what the trainer does to files of the run: opening for writing, having written a half
or the whole, renaming, removing, making folders, fsync.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fastrl.cli import main
from fastrl.environments.pool import Outcomes
from fastrl.environments.protocol import Problem
from fastrl.training import environment, log_files, tensor_files

KILLED = -int(signal.SIGKILL)

forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a process with a GPU has threads that a fork loses"
)

_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


class QuickPool:
    """Scores in this process, by a number that differs between any two answers."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def launch(self) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def set_probe(self, problem: Problem) -> None:
        pass

    def score(self, problems: Sequence[Problem], answers: Sequence[str | None]) -> Outcomes:
        pairs = zip(problems, answers, strict=True)
        texts = [problem.prompt + str(answer) for problem, answer in pairs]
        return Outcomes([sum(map(ord, text)) % 7 / 6 for text in texts])


def score_here(patch: pytest.MonkeyPatch) -> None:
    """Lets runs of this process and its children do without scoring processes."""
    patch.setattr(environment, "ScoringPool", QuickPool)


def start_child(function: Callable[[], int], out: Path) -> int:
    """The process id of a child that calls a function for its exit code; 70 is a traceback.

    Args:
        function: called in the child.
        out: file that the child's output goes to.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's waiting threads
        child = os.fork()
    if child:
        return child
    code = 70
    try:
        with out.open("a", encoding="utf-8") as file:
            sys.stdout = sys.stderr = file
            try:
                code = function()
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """The exit code of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train_in_child(run_dir: Path, *arguments: str, kill_at: int | None = None) -> int:
    """The exit code of `fastrl train` in a child, killed at one of its operations.

    Args:
        run_dir: its folder; the output goes to a file beside it.
        arguments: of the command.
        kill_at: number of the operation, from 0; None to live. A run with fewer ends as usual.
    """

    def train() -> int:
        if kill_at is not None:
            Killer(kill_at).arm()
        return main(["train", *arguments, "--run-dir", str(run_dir)])

    return exit_code(start_child(train, run_dir.with_suffix(".out")))


def train_on_ranks(size: int, run_dir: Path, *arguments: str) -> list[int]:
    """The exit codes of `fastrl train --resume` on forked ranks."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

    def train(rank: int) -> int:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in {**ranks, **place}.items()})
        # A fork leaves the pool of torch's threads to be made anew, by one thread at a time.
        torch.set_num_threads(1)
        return main(["train", *arguments, "--run-dir", str(run_dir), "--resume"])

    out = run_dir.with_suffix(".out")
    children = [start_child(partial(train, rank), out) for rank in range(size)]
    return [exit_code(child) for child in children]


def count_operations(run_dir: Path, *arguments: str) -> int:
    """The number of operations of a run that is not killed."""
    counted = run_dir.with_suffix(".count")

    def train() -> int:
        killer = Killer(10**9)
        killer.arm()
        code = main(["train", *arguments, "--run-dir", str(run_dir)])
        with counted.open("w", encoding="utf-8") as file:
            file.write(str(killer.num_operations - 1))  # opening this file
        return code

    assert exit_code(start_child(train, run_dir.with_suffix(".out"))) == 0
    return int(counted.read_text(encoding="utf-8"))


class Killer:
    """Kills this process at an operation; for a child, as nothing is undone.

    Args:
        at: number of the operation, from 0.
    """

    def __init__(self, at: int) -> None:
        self._at = at
        self.num_operations = 0

    def arm(self) -> None:
        """Watches the operations from now on."""
        patch = pytest.MonkeyPatch()
        patch.setattr(os, "fsync", self._before(os.fsync))
        patch.setattr(log_files, "_write_line", self._line(log_files._write_line))
        patch.setattr(Path, "write_text", self._file(Path.write_text, 0))
        patch.setattr(Path, "write_bytes", self._file(Path.write_bytes, 0))
        patch.setattr(tensor_files, "_write_at", self._tensor(tensor_files._write_at))
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_open = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if (is_open or event in _EVENTS) and self._is_here():
            _kill()

    def _is_here(self) -> bool:
        self.num_operations += 1
        return self.num_operations - 1 == self._at

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            if self._is_here():
                _kill()
            return function(*arguments)

        return operation

    def _line(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(file: Any, record: Any) -> None:
            size = os.fstat(file.fileno()).st_size
            function(file, record)
            if self._is_here():
                os.ftruncate(file.fileno(), (size + os.fstat(file.fileno()).st_size) // 2)
                _kill()

        return operation

    def _tensor(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(handle: int, content: Any, place: int) -> None:
            if self._is_here():
                function(handle, content[: len(content) // 2], place)
                _kill()
            function(handle, content, place)

        return operation

    def _file(self, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        def operation(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if self._is_here():
                os.truncate(arguments[place], os.path.getsize(arguments[place]) // 2)
                _kill()
            if self._is_here():
                _kill()
            return result

        return operation


def _kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a log of a run, without what the clock says."""
    timed = {"seconds", "tokens_per_second"}
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{key: record[key] for key in record if key not in timed} for record in records]


def check_same(run: Path, whole: Path, *, may_have_more: bool = False) -> None:
    """Asserts that a run that was stopped left what one did that was not.

    Args:
        run: folder of the first.
        whole: folder of the second.
        may_have_more: whether further files are allowed.
    """
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert lines(run / name) == lines(whole / name)
    names, wanted = (
        {path.relative_to(folder).as_posix() for path in folder.rglob("*")} - {".lock"}
        for folder in (run, whole)
    )
    assert names >= wanted if may_have_more else names == wanted
    for name in wanted:
        has_times = name.endswith(("/progress.json", "/manifest.json"))
        if name.startswith("checkpoints/") and (whole / name).is_file() and not has_times:
            assert (run / name).read_bytes() == (whole / name).read_bytes(), name
