"""Memory that fastrl asks for without initialising it is filled, so that reading it shows."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def poison_empty_memory(patch: pytest.MonkeyPatch) -> None:
    """Makes `torch.empty` and its like, called from fastrl, give NaN or the largest integer."""
    for holder, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ):
        patch.setattr(holder, name, filling(getattr(holder, name)))


def filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `allocate` that fills what it gives to a caller inside fastrl."""

    def allocate_filled(*args: Any, **kwargs: Any) -> Tensor:
        memory = allocate(*args, **kwargs)
        if torch.compiler.is_compiling():
            return memory
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _fill(memory) if caller.split(".")[0] == "fastrl" else memory

    return allocate_filled


def _fill(memory: Tensor) -> Tensor:
    """Returns the tensor, filled in place with NaN, the largest integer or True."""
    with torch.no_grad():
        if memory.is_floating_point() or memory.is_complex():
            return memory.fill_(float("nan"))
        if memory.dtype == torch.bool:
            return memory.fill_(True)
        return memory.fill_(torch.iinfo(memory.dtype).max)
