"""The end of a process that makes no progress, such as one that waits for a rank that hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback

HUNG = 1
"""Exit code of a process that made no progress."""

# By then the thread has had its turn, unless a call that does not return holds the interpreter.
_SECONDS_FOR_THE_THREAD = 5.0


class Watch:
    """Ends this process, with the stack of each thread, if `progress` is not called in time.

    A thread does it. While a call holds the interpreter, where no thread of Python can run,
    `faulthandler` does it a few seconds later.

    Args:
        timeout: longest time between two calls, in seconds; the first counts from here.
        name: of the process, for the message.
    """

    def __init__(self, timeout: float, name: str) -> None:
        self._timeout = timeout
        self._name = name
        self._ended = threading.Event()
        faulthandler.enable(file=2)  # NCCL's own watchdog aborts the process
        self.progress()
        threading.Thread(target=self._watch, name="fastrl-watch", daemon=True).start()

    def progress(self) -> None:
        """Starts the time anew."""
        self._deadline = time.monotonic() + self._timeout
        later = self._timeout + _SECONDS_FOR_THE_THREAD
        faulthandler.dump_traceback_later(later, exit=True, file=2)

    def end(self) -> None:
        """Ends the watch, not the process."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            if self._ended.wait(left):
                return
        os.write(2, self._message().encode("utf-8", "replace"))
        os._exit(HUNG)

    def _message(self) -> str:
        lines = [
            f"fastrl: error: {self._name} made no progress for {self._timeout:g} s "
            "(`parallel.timeout`), so the job ends; the last checkpoint is as it was. It was here, "
            "and a rank without such a message is likely the one that hangs:\n"
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines.append(f"thread {names.get(ident, ident)}, the innermost call last:\n")
                lines += traceback.format_stack(frame)
        return "".join(lines)
