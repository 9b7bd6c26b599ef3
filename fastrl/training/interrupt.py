"""Signals that stop a run: it finishes the step and saves. Ctrl-C ends other commands at once.

Nothing here imports torch: `end_at_once` must be in place before what takes long to import.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as in shells."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what schedulers send before they kill, and the end of a terminal."""


def exit_code(number: int) -> int:
    """The exit code of a command that a signal ended, as in shells: 130 for SIGINT."""
    return 128 + number


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """The handler of SIGINT while there is nothing to save and nothing to clean up.

    A KeyboardInterrupt amid an import can be lost in a callback of the import system, or come out
    as another error.
    """
    os.write(2, b"fastrl: interrupted\n")
    os._exit(INTERRUPTED)


class StopRequest:
    """While entered, the first of `STOPPING` sets `number`, the next raises KeyboardInterrupt.

    That exception's argument is the signal's number. A SIGHUP that is ignored stays so, as under
    `nohup`.

    Args:
        announce: called at the first signal, from its handler.

    Attributes:
        number: of the first signal; 0 before.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self.number = 0
        self._announce = announce
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in STOPPING:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt(number)
        self.number = number
        self._announce()
