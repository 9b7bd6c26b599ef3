"""Saving a run's checkpoints: in the background, by torch's distributed checkpoint.

The run waits while its tensors are copied to the host, page-locked where that is of use: on each
rank its own shards. All else, planning over the ranks, writing, fsync, checksums and the rename, is
done by a thread with collectives of its own, while the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from fastrl.config import RunConfig, UserError
from fastrl.training.checkpoint import NewCheckpoint
from fastrl.training.model import ModelFiles
from fastrl.training.processes import Processes
from fastrl.training.tensor_files import (
    Layout,
    TensorFilesWriter,
    failure_of,
    ignore_no_dist,
    write_now,
)
from fastrl.training.trainer_state import (
    PROGRESS_FILE,
    TRAINER_FOLDER,
    TrainerState,
    progress_json,
    state_tensors,
)


class _UnderWay(NamedTuple):
    checkpoint: NewCheckpoint
    future: Future[Any]


class _Stager(DefaultStager):
    """Keeps its memory, for page-locked memory takes long to get.

    Before 2.13, torch's gives it up at each use, and can be used once.
    """

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        copy: dict[str, Any] = self._state_dict_stager.stage(state_dict)
        return copy


class CheckpointSaver:
    """Writes the checkpoints of a run, one after another; on leaving the last one is written.

    All ranks make the same calls.

    Args:
        run_dir: folder of the run, on a file system that all ranks share.
        config: of the run; `checkpoint.asynchronous` decides whether `save` waits for the disk.
        processes: of the run.
        say: takes messages about old checkpoints that cannot be removed.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        processes: Processes,
        say: Callable[[str], object],
    ) -> None:
        self._run_dir = run_dir
        self._say = say
        self._config = config
        self._processes = processes
        # The thread's collectives must not meet those of the run, which may be of a GPU.
        self._group = None if processes.mesh is None else dist.new_group(backend="gloo")
        # Copies that do not block would be waited for on torch's current device, which need not be
        # that of the run.
        self._stager = _Stager(
            StagingOptions(
                use_pinned_memory=processes.device.type == "cuda",
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._under_way: _UnderWay | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
            self._stager.close()
        elif isinstance(error, UserError | OSError):
            try:
                self.wait()
            except UserError as failure:
                raise UserError(f"{error}\n{failure}") from error
        # Other errors and Ctrl-C go on at once; the interpreter waits for the thread at its end.

    @property
    def has_failed(self) -> bool:
        """Whether the checkpoint under way is known to have failed, on this rank."""
        if self._under_way is None or not self._under_way.future.done():
            return False
        return self._under_way.future.exception() is not None

    def save(self, model: ModelFiles, state: TrainerState, files: Mapping[str, bytes]) -> None:
        """Writes a checkpoint, or begins to, when the one before is written.

        The tensors may change when it returns.

        Args:
            model: its files; its tensors are those of the run, sharded or not.
            state: its tensors likewise.
            files: contents of further files by name, those of the tokenizer.

        Raises:
            UserError: this checkpoint, or the one before, cannot be written; nothing is left of it.
        """
        self.wait()
        layout = Layout.of({**model.tensors, **state_tensors(state)})
        progress = {f"{TRAINER_FOLDER}/{PROGRESS_FILE}": progress_json(state)}
        checkpoint = NewCheckpoint(
            self._run_dir,
            self._config,
            state,
            {**files, **model.contents, **progress},
            self._say,
        )
        writer = TensorFilesWriter(
            checkpoint.temporary, layout, begin=checkpoint.begin, finish=checkpoint.finish
        )
        own = self._processes.share_of(layout.tensors)
        self._under_way = _UnderWay(checkpoint, self._start(writer, own))
        if not self._config.checkpoint.asynchronous:
            self.wait()

    def _start(self, writer: TensorFilesWriter, tensors: dict[str, Any]) -> Future[Any]:
        """The writing, under way or done."""
        no_dist = self._group is None
        if self._config.checkpoint.asynchronous:
            if no_dist:
                ignore_no_dist()  # for its thread
            future = async_save(
                tensors,
                storage_writer=writer,
                process_group=self._group,
                async_stager=self._stager,
                no_dist=no_dist,
            )
            assert isinstance(future, Future)
            return future
        future = Future()
        try:
            write_now(tensors, writer, self._group)
            future.set_result(None)
        except CheckpointException as error:
            future.set_exception(error)
        return future

    def wait(self) -> None:
        """Returns when no checkpoint is under way.

        Raises:
            UserError: it could not be written; nothing is left of it. On all ranks.
        """
        if self._under_way is None:
            return
        (checkpoint, future), self._under_way = self._under_way, None
        error = future.exception()
        if error is None:
            return
        rank, failure = failure_of(error)
        if not isinstance(failure, OSError):
            raise failure from None if failure is error else error  # which has the rank's traceback
        cause = str(failure.strerror or failure)
        if rank and isinstance(failure, FileNotFoundError):
            cause = (
                f"{cause} on rank {rank}; the run's folder must be on a file system that all ranks"
                " share"
            )
        raise checkpoint.failed(cause, cleans=self._processes.is_main) from failure
