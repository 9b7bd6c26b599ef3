"""The trainer's side of a worker process: its pipes, its start and its end."""

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
    """A started worker. Only `end` waits for it.

    Args:
        start: pickled `Start`.
        has_fence: whether the worker gets a few harmless environment variables only.

    Attributes:
        messages: descriptor to write messages to.
        answers: descriptor to read frames from.
        unsent: part of the messages that the pipe has had no room for.
        numbers: indices of the items that it still has to score.
        count: number of items that it has scored.
        deadline: monotonic time by which it must answer; None while no answer is due.
        is_ready: whether it has started.
        has_ended: whether it has closed its pipe.
        text: its message if it could not start.
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
                start_new_session=True,  # Ctrl-C in a terminal reaches the trainer alone
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
        """Of the process once it has ended; negative for a signal."""
        return self._process.returncode

    def send(self, message: bytes) -> None:
        """Sends a message as far as the pipe takes it; `send_more` sends the rest."""
        self.unsent = memoryview(bytes(self.unsent) + message)
        self.send_more()

    def send_more(self) -> None:
        """Sends what is unsent, as far as the pipe takes it."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.messages, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = memoryview(b"")  # `read` notices a dead worker

    def read(self) -> list[tuple[int, int, float]]:
        """The frames that came since the last call; a message after FAILED goes to `text`."""
        with contextlib.suppress(BlockingIOError):
            while not self.has_ended:
                data = os.read(self.answers, 2**16)
                self._received += data
                self.has_ended = not data
                if len(self._received) > _MAX_RECEIVED:
                    break  # bounds the buffer; `read` is called again
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
        """Whether a frame is the answer that is due next."""
        is_answer = kind in (SCORE, ERROR) and math.isfinite(value)
        return is_answer and bool(self.numbers) and count == self.count + 1

    def end(self) -> None:
        """Kills the process and its children, and waits for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self.messages)
        os.close(self.answers)


def _variables(*, has_fence: bool) -> dict[str, str]:
    """The worker's environment variables: its module path, and no secrets of the trainer."""
    kept = dict(os.environ)
    if has_fence:
        kept = {name: kept[name] for name in _KEPT_VARIABLES if name in kept}
    paths = [path or os.getcwd() for path in sys.path]
    # One thread, as threads that exist do not move to the new network namespace.
    return kept | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONPATH": os.pathsep.join(paths)}
