"""Ctrl-C: it ends a command at once, but in a run the first one stops after the step and saves.

Nothing here imports torch: `end_at_once` must be in place before what takes long to import.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn, Self

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as in shells."""


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """The handler of SIGINT while there is nothing to save and nothing to clean up.

    A KeyboardInterrupt amid an import can be lost in a callback of the import system, or come out
    as another error.
    """
    os.write(2, b"fastrl: interrupted\n")
    os._exit(INTERRUPTED)


class StopRequest:
    """While entered, SIGINT sets `requested`; the next one raises KeyboardInterrupt.

    Args:
        announce: called at the first SIGINT, from the signal handler.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self.requested = False
        self._announce = announce

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.requested = True
        self._announce()
