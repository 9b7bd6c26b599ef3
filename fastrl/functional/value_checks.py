"""Checks of values that may be on a GPU, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def require_all(holds: Tensor, message: str, found: Callable[[], str], remedy: str = "") -> None:
    """Refuses values that do not all hold.

    Args:
        holds: bool, of any shape.
        message: what is required.
        found: what came, to follow the message; only called on the CPU.
        remedy: the end of the message.

    Raises:
        ValueError: on the CPU; on a GPU, where the values are the device's, an asynchronous
            assertion.
    """
    if holds.is_cuda:
        torch._assert_async(holds.all(), message + remedy)
    elif not bool(holds.all()):
        raise ValueError(message + found() + remedy)
