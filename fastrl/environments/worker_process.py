"""The trainer's end of a worker process: its pipes, and how it is started and killed."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections import deque

from fastrl.environments.worker import ERROR, FAILED, FRAME, MAX_TEXT, SCORE

_KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TZ")
_MAX_RECEIVED = 2**16
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    """A worker that was started. Nothing here waits for it but `end`.

    Args:
        start: pickled `Start`.
        has_fence: whether the worker gets no environment variables but a few harmless ones.

    Attributes:
        messages: descriptor that takes messages.
        answers: descriptor that gives frames.
        unsent: what of the messages the pipe had no room for yet.
        numbers: of the items that it has to score.
        count: of the items that it has scored.
        deadline: monotonic time of its next answer; None while none is awaited.
        is_ready: whether it has started.
        has_ended: whether it has closed its pipe.
        text: what it said when it could not start.
    """

    def __init__(self, start: bytes, *, has_fence: bool) -> None:
        self.numbers: deque[int] = deque()
        self.count = 0
        self.deadline: float | None = None
        self.is_ready = self.has_ended = False
        self.text = ""
        self.unsent = memoryview(b"")
        self._received = b""
        theirs_in, self.messages = os.pipe()
        self.answers, theirs_out = os.pipe()
        module = ["-P", "-m", "fastrl.environments.worker"]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *module, str(theirs_out), str(os.getpid())],
                stdin=theirs_in,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs_out,),
                env=_variables(has_fence=has_fence),
                start_new_session=True,  # Ctrl-C on a terminal is the trainer's alone
            )
        except BaseException:
            os.close(self.messages)
            os.close(self.answers)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(self.messages, False)
        os.set_blocking(self.answers, False)
        self.send(start)

    @property
    def exit_code(self) -> int | None:
        """Of the ended process; negative for a signal."""
        return self._process.returncode

    def send(self, message: bytes) -> None:
        """Sends a message, or as much as the pipe takes; `send_more` sends the rest."""
        self.unsent = memoryview(bytes(self.unsent) + message)
        self.send_more()

    def send_more(self) -> None:
        """Sends what is left to send, as far as the pipe takes it."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.messages, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = memoryview(b"")  # a dead one is seen by `read`

    def read(self) -> list[tuple[int, int, float]]:
        """The frames that have come since the last call; a text goes to `text`."""
        with contextlib.suppress(BlockingIOError):
            while not self.has_ended:
                data = os.read(self.answers, 2**16)
                self._received += data
                self.has_ended = not data
                if len(self._received) > _MAX_RECEIVED:
                    break  # it says too much; `read` will be called again
        frames: list[tuple[int, int, float]] = []
        start = 0
        while len(self._received) >= start + FRAME.size:
            kind, count, value = FRAME.unpack_from(self._received, start)
            stop = start + FRAME.size
            if kind == FAILED and 0 <= value <= MAX_TEXT:
                stop += int(value)
                if len(self._received) < stop:
                    break
                self.text = self._received[start + FRAME.size : stop].decode("utf-8", "replace")
            frames.append((kind, count, value))
            start = stop
        self._received = self._received[start:]
        return frames

    def expects(self, kind: int, count: int, value: float) -> bool:
        """Whether a frame is the answer that it owes next."""
        is_answer = kind in (SCORE, ERROR) and math.isfinite(value)
        return is_answer and bool(self.numbers) and count == self.count + 1

    def end(self) -> None:
        """Kills the process with what it may have started, and waits for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self.messages)
        os.close(self.answers)


def _variables(*, has_fence: bool) -> dict[str, str]:
    """The worker's environment variables: where its modules are, and no secrets of the trainer."""
    kept = dict(os.environ)
    if has_fence:
        kept = {name: kept[name] for name in _KEPT_VARIABLES if name in kept}
    paths = [path or os.getcwd() for path in sys.path]
    # One thread: others would not follow into the network namespace.
    return kept | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONPATH": os.pathsep.join(paths)}
