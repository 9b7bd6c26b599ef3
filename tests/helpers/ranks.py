"""A pool of rank processes: functions run on n gloo ranks without starting n processes each time.

Processes are forked from a server that has imported torch and fastrl once, wait for work, and keep
their process group between calls, a set of processes for each number of ranks. (DTensor remembers
meshes, so a process group cannot be replaced in a living process.) A rank that raises, dies or does
not answer ends the call at once with its traceback (or the place where it stands); the next call
starts a new set.
"""

from __future__ import annotations

import faulthandler
import gc
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
from torch.distributed.device_mesh import DeviceMesh

from fastrl.parallel import ParallelGroups, device_mesh
from tests.helpers.poison import poison_empty_memory

PRELOAD = ["torch", "torch.distributed.tensor.parallel", "fastrl.models.llama", __name__]


class RankError(AssertionError):
    """What went wrong on a rank, with its traceback."""


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Worker:
    process: Any
    connection: Connection
    stack_file: Path  # where the process writes its place when it hangs


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
        self._sets: dict[int, list[_Worker]] = {}
        self._num_sets = 0

    def __call__(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Results of `function(*arguments)` on ranks 0 to `world_size` - 1.

        Args:
            function: defined at the top of a module; arguments and results are pickled.
            world_size: ranks of the default process group while it runs.
            arguments: the same on every rank.

        Raises:
            RankError: a rank raised, died or did not answer.
        """
        if world_size not in self._sets:
            self._num_sets += 1
            rendezvous = str(self.directory / f"rendezvous-{self._num_sets}")
            self._sets[world_size] = [
                self._start(rank, world_size, rendezvous) for rank in range(world_size)
            ]
        workers = self._sets[world_size]
        task = pickle.dumps(_Task(function, arguments))
        for worker in workers:
            worker.connection.send_bytes(task)
        try:
            return self._collect(workers)
        except RankError:
            # The others may wait in a collective for ever.
            _end(self._sets.pop(world_size))
            raise

    def close(self) -> None:
        """Ends all processes."""
        for workers in self._sets.values():
            _end(workers)
        self._sets = {}

    def _start(self, rank: int, world_size: int, rendezvous: str) -> _Worker:
        here, there = self._context.Pipe()
        stack_file = self.directory / f"stack-{self._num_sets}-{rank}"
        process = self._context.Process(
            target=_serve,
            args=(there, rank, world_size, rendezvous, str(stack_file)),
            daemon=True,
        )
        process.start()
        there.close()
        return _Worker(process, here, stack_file)

    def _collect(self, workers: list[_Worker]) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
        while len(results) < len(workers):
            pending = [c for c, rank in ranks.items() if rank not in results]
            ready = wait(pending, max(deadline - time.monotonic(), 0))
            if not ready:
                raise RankError(self._hung({ranks[c]: workers[ranks[c]] for c in pending}))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                try:
                    error, result = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    error, result = "died", None
                if error is not None:
                    raise RankError(_died(workers) or f"rank {rank} raised\n{error}")
                results[rank] = result
        return [results[rank] for rank in range(len(workers))]

    def _hung(self, workers: dict[int, _Worker]) -> str:
        for worker in workers.values():
            os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"rank {rank}:\n{workers[rank].stack_file.read_text()}" for rank in workers]
        return f"no answer within {self.timeout} s from ranks {[*workers]}\n" + "\n".join(stacks)


def _died(workers: list[_Worker]) -> str | None:
    """Which ranks died; the others may have raised for that reason, and sooner."""
    wait([worker.process.sentinel for worker in workers], 1.0)
    codes = {rank: worker.process.exitcode for rank, worker in enumerate(workers)}
    died = [f"rank {rank} died with exit code {codes[rank]}" for rank in codes if codes[rank]]
    return ", ".join(died) or None


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()


def _serve(
    connection: Connection, rank: int, world_size: int, rendezvous: str, stack_file: str
) -> None:
    """The loop of one rank's process, which ends with the pool's."""
    gc.freeze()
    torch.set_num_threads(1)
    poison_empty_memory(pytest.MonkeyPatch())
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        while True:
            try:
                task: _Task = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            error, result = None, None
            try:
                torch.manual_seed(0)
                result = task.function(*task.arguments)
            except BaseException:
                error = traceback.format_exc()
            connection.send_bytes(pickle.dumps((error, result)))


def rank_device() -> torch.device:
    """The device of a rank: a GPU under NCCL, as `tests.gpu.nccl_matrix` has it."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@cache
def rank_mesh(data: int, sequence_data: int, tensor: int) -> DeviceMesh:
    """The mesh of all ranks, made once; to be called on a rank, and on all of them."""
    return device_mesh(
        data=data,
        sequence_data=sequence_data,
        tensor=tensor,
        device_type=rank_device().type,
    )


@cache
def parallel_groups(
    data: int, sequence_data: int, tensor: int, sequence_parallel: bool = False
) -> ParallelGroups:
    """This rank's groups, made once; to be called on a rank, and on all of them."""
    mesh = rank_mesh(data, sequence_data, tensor)
    return ParallelGroups.from_mesh(mesh, sequence_parallel=sequence_parallel)
