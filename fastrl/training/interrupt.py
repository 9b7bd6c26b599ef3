"""Ctrl-C: the first stops a run after its step, the second at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


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
