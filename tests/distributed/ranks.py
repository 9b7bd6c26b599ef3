"""A pool of rank processes: functions run on n gloo ranks without starting n processes each time.

Processes are forked from a server that has imported torch and fastrl once, wait for work, and keep
their process group between calls. A rank that raises, dies or does not answer ends the call at once
with its traceback (or the place where it stands); the pool then starts anew.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastrl.parallel import ParallelGroups, device_mesh
from tests.poison import poison_empty_memory

PRELOAD = ["torch", "torch.distributed.tensor.parallel", "fastrl.models.llama", __name__]


class RankError(AssertionError):
    """What went wrong on a rank, with its traceback."""


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    world_size: int
    rendezvous: str


@dataclass(frozen=True)
class _Worker:
    process: Any
    connection: Connection


class RankPool:
    """Runs functions on gloo ranks.

    Args:
        directory: for rendezvous files and reports of hung ranks.
        timeout: seconds that a call may take.
    """

    def __init__(self, directory: Path, timeout: float = 60.0) -> None:
        self.directory = directory
        self.timeout = timeout
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[_Worker] = []
        self._world_size = 0
        self._epoch = 0

    def __call__(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Results of `function(*arguments)` on ranks 0 to `world_size` - 1.

        Args:
            function: defined at the top of a module; arguments and results are pickled.
            world_size: ranks of the default process group while it runs.
            arguments: the same on every rank.

        Raises:
            RankError: a rank raised, died or did not answer.
        """
        while len(self._workers) < world_size:
            self._workers.append(self._start(len(self._workers)))
        if world_size != self._world_size:
            self._world_size, self._epoch = world_size, self._epoch + 1
        rendezvous = str(self.directory / f"rendezvous-{self._epoch}")
        task = pickle.dumps(_Task(function, arguments, world_size, rendezvous))
        for worker in self._workers[:world_size]:
            worker.connection.send_bytes(task)
        return self._collect(world_size)

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers, self._world_size = [], 0

    def _start(self, rank: int) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(there, rank, str(self._stack_file(rank))), daemon=True
        )
        process.start()
        there.close()
        return _Worker(process, here)

    def _stack_file(self, rank: int) -> Path:
        return self.directory / f"stack-{rank}"

    def _collect(self, world_size: int) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        connections = {self._workers[rank].connection: rank for rank in range(world_size)}
        while len(results) < world_size:
            pending = [c for c, rank in connections.items() if rank not in results]
            ready = wait(pending, max(deadline - time.monotonic(), 0))
            if not ready:
                self._fail(self._hung(sorted(set(range(world_size)) - set(results))))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = connections[connection]
                try:
                    error, result = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    error, result = "died", None
                if error is not None:
                    self._fail(self._died(world_size) or f"rank {rank} raised\n{error}")
                results[rank] = result
        return [results[rank] for rank in range(world_size)]

    def _died(self, world_size: int) -> str | None:
        """Which ranks died; the others may have raised for that reason, and sooner."""
        processes = [worker.process for worker in self._workers[:world_size]]
        wait([process.sentinel for process in processes], 1.0)
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        died = [f"rank {rank} died with exit code {codes[rank]}" for rank in codes if codes[rank]]
        return ", ".join(died) or None

    def _hung(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"rank {rank}:\n{self._stack_file(rank).read_text()}" for rank in ranks]
        return f"no answer within {self.timeout} s from ranks {ranks}\n" + "\n".join(stacks)

    def _fail(self, message: str) -> None:
        # The others may wait in a collective for ever.
        self.close()
        raise RankError(message)


def _serve(connection: Connection, rank: int, stack_file: str) -> None:
    """The loop of one rank's process, which ends with the pool's."""
    torch.set_num_threads(1)
    poison_empty_memory(pytest.MonkeyPatch())
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        current, error = None, None
        while True:
            try:
                task: _Task = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                if task.rendezvous != current:
                    _join_process_group(task, rank)
                    current = task.rendezvous
                torch.manual_seed(0)
                error, result = None, task.function(*task.arguments)
            except BaseException:
                error, result = traceback.format_exc(), None
            connection.send_bytes(pickle.dumps((error, result)))


def _join_process_group(task: _Task, rank: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    parallel_groups.cache_clear()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.rendezvous}",
        rank=rank,
        world_size=task.world_size,
    )


@cache
def parallel_groups(
    data: int, sequence_data: int, tensor: int, sequence_parallel: bool = False
) -> ParallelGroups:
    """This rank's groups, made once; to be called on a rank, and on all of them."""
    mesh = device_mesh(data=data, sequence_data=sequence_data, tensor=tensor, device_type="cpu")
    return ParallelGroups.from_mesh(mesh, sequence_parallel=sequence_parallel)
