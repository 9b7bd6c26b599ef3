"""What a process does to itself when it is to fail."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

import torch


class InjectedError(Exception):
    """No error of the package."""


def raise_error() -> NoReturn:
    raise InjectedError("injected")


def raise_from_a_thread() -> None:
    def throw() -> None:
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(InjectedError))

    threading.Thread(target=throw).start()
    time.sleep(0.05)


def raise_from_a_handler() -> None:
    def throw(number: int, frame: FrameType | None) -> None:
        raise InjectedError("injected")

    signal.signal(signal.SIGUSR1, throw)
    signal.raise_signal(signal.SIGUSR1)


def raise_device_error() -> None:
    torch.zeros(2)[torch.tensor([7])]


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def send_sigterm() -> None:
    """Sends SIGTERM to this process."""
    send(signal.SIGTERM)


def segfault() -> None:
    ctypes.string_at(1)


def hold_the_interpreter(letters: int) -> None:
    re.match(f"(a?){{{letters}}}a{{{letters}}}", "a" * letters)


def never_return() -> None:
    time.sleep(1000)
