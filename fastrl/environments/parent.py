"""A process that ends with the one that started it, for whatever reason that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_SECONDS_BETWEEN_LOOKS = 0.5


def end_with_parent(parent: int | None = None) -> None:
    """Has this process killed when its parent ends: by the kernel on Linux, else by a thread.

    Args:
        parent: process id of the parent; if it has ended already, so does this process. Default:
            whoever is the parent now.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)
