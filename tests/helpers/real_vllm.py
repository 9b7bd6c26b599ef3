"""A vLLM server in a process of its own, on the CPU and one thread."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

_SECONDS_TO_START = 300

# One thread, little memory, and nothing from a hub.
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class RealVllm:
    """The server.

    Args:
        command: of vLLM.
        folder: of the model that it starts with.
        log: file of its output.
    """

    def __init__(self, command: str, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
        self._arguments = [command, "serve", str(folder), "--port", str(self.port), *options]
        self._log = log

    def start(self) -> None:
        """Returns when it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments,
                env=os.environ | _ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + _SECONDS_TO_START
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.end()
                raise AssertionError(self._log.read_text(encoding="utf-8")[-4000:])
            time.sleep(1)

    def end(self) -> None:
        """Kills its processes."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
