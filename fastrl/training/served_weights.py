"""The folder in which servers find the weights of a step."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fastrl.config.base import UserError
from fastrl.training.model import ModelFiles
from fastrl.training.processes import Processes
from fastrl.training.run_folder import LOCK_FILE, RunFolder
from fastrl.training.tensor_files import Layout, TensorFilesWriter, failure_of, write_now
from fastrl.training.trainer_state import TRAINER_FOLDER

_OWN = re.compile(r"\.?version-[0-9]{6,15}(\.partial)?")


class ServedWeights:
    """A model of each version, in a folder of its own that appears when it is complete.

    All processes make the same calls; each writes its shards.

    Args:
        folder: of these folders, on a file system that all processes and servers share.
        processes: of the run.
    """

    def __init__(self, folder: Path, processes: Processes) -> None:
        self._folder = folder.absolute()
        self._processes = processes
        self._group = None if processes.mesh is None else dist.new_group(backend="gloo")
        self._lock: RunFolder | None = None
        self._in_use = ExitStack()
        self._before: Path | None = None

    def check(self) -> None:
        """Refuses a folder with files that are not weights for servers.

        Raises:
            UserError: on all processes.
        """
        self._processes.from_main(self._check)

    def write(self, files: ModelFiles, version: int) -> Path:
        """The folder of a version, when it is complete; that of the version before stays.

        Args:
            files: of the model; its tensors are those of the run, sharded or not.
            version: counted.

        Raises:
            UserError: it cannot be written, or another process uses the folder; on all processes.
        """
        self._processes.from_main(self._enter)
        target = self._folder / f"version-{version:06}"
        temporary = target.with_name(f".{target.name}.partial")
        served = {
            name: tensors
            for name, tensors in files.tensors.items()
            if not name.startswith(f"{TRAINER_FOLDER}/")
        }

        def begin() -> None:
            for path in (temporary, target):
                shutil.rmtree(path, ignore_errors=True)
            temporary.mkdir()
            for name, content in files.contents.items():
                file = temporary / name
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)

        def finish() -> None:
            temporary.rename(target)

        layout = Layout.of(served)
        writer = TensorFilesWriter(temporary, layout, begin=begin, finish=finish)
        try:
            write_now(self._processes.share_of(layout.tensors), writer, self._group)
        except CheckpointException as error:
            rank, failure = failure_of(error)
            if not isinstance(failure, OSError):
                raise
            raise UserError(
                f"{target}: the weights for the servers cannot be written: "
                f"{failure.strerror or failure} (rank {rank}); the run ends here"
            ) from failure
        return target

    def keep(self, folder: Path) -> None:
        """Removes the folder that was kept before, which no server reads any more."""
        before, self._before = self._before, folder
        if before not in (None, folder) and self._processes.is_main:
            assert before is not None
            shutil.rmtree(before, ignore_errors=True)

    def close(self) -> None:
        """Leaves the folder to others, with the last weights."""
        self._in_use.close()
        self._lock = None

    def _check(self) -> None:
        if not self._folder.exists():
            return
        if not self._folder.is_dir():
            raise UserError(f"{self._folder}: `rollouts.weights.folder` must be a folder, is none")
        names = [path.name for path in self._folder.iterdir() if path.name != LOCK_FILE]
        others = [name for name in names if _OWN.fullmatch(name) is None]
        if others:
            raise UserError(
                f"{self._folder}: `rollouts.weights.folder` must be new or empty, as the run"
                f" removes old weights from it, but has {min(others)}; give another folder"
            )

    def _enter(self) -> None:
        """Locks the folder once, and removes what a run before has left there."""
        if self._lock is not None:
            self._lock.check()
            return
        self._check()
        self._lock = self._in_use.enter_context(RunFolder(self._folder, writes=True))
        for path in self._folder.iterdir():
            if _OWN.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
