"""The folder of a run: one process at a time writes to it, and nobody makes it anew."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO, Any, Self

from fastrl.config.base import UserError

LOCK_FILE = ".lock"


class RunFolder:
    """The folder of a run, locked while entered.

    The lock (flock) ends with the `with` block or with the process, by the kernel, so a lock file
    that is left says nothing.

    Args:
        path: of the folder, which entering makes.
        writes: whether this process writes; the others neither lock nor check.
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes
        self._lock: IO[str] | None = None

    def check(self) -> None:
        """Raises UserError if the folder is no longer in its place."""
        if self._lock is not None:
            check_in_place(self._lock)

    def __enter__(self) -> Self:
        """Locks.

        Raises:
            UserError: another process holds the lock; the message names it.
            OSError: the folder or its lock file cannot be made, or the file system has no locks.
        """
        if self._writes:
            self._lock = _locked(self.path)
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.close()


def check_in_place(file: IO[Any]) -> None:
    """Refuses to go on with an open file that was removed, moved or replaced.

    Args:
        file: opened by its path.

    Raises:
        UserError: its path does not lead to it.
    """
    try:
        is_same = os.path.samestat(os.stat(file.name), os.fstat(file.fileno()))
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise UserError(
            f"{file.name}: must stay in its place while the run trains, but was removed, moved or "
            "replaced; the run ends here and writes nothing more"
        )


def _locked(folder: Path) -> IO[str]:
    folder.mkdir(parents=True, exist_ok=True)
    # Not emptied by opening it: it may be another's.
    file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = _described(file.read())
        file.close()
        raise UserError(
            f"{folder}: must be used by one process at a time, is in use by {holder}; wait for its "
            "end or stop it"
        ) from None
    except OSError as error:
        file.close()
        raise OSError(
            error.errno, f"the folder cannot be locked: {error.strerror}", str(folder)
        ) from error
    file.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
    file.flush()
    return file


def _described(text: str) -> str:
    try:
        holder = json.loads(text)
        return f"process {int(holder['pid'])} on host {str(holder['host'])[:80]}"
    except (ValueError, TypeError, KeyError):
        return "another process"
