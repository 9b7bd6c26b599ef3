"""The poison itself: without it, a test of uninitialised memory could not fail."""

from collections.abc import Callable
from types import FunctionType

import pytest
import torch
from torch import Tensor

from tests.helpers.poison import filling

_ALLOCATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda like: torch.empty(3, dtype=like.dtype),
    "empty_like": lambda like: torch.empty_like(like),
    "empty_strided": lambda like: torch.empty_strided((3,), (1,), dtype=like.dtype),
    "new_empty": lambda like: like.new_empty(3),
    "new_empty_strided": lambda like: like.new_empty_strided((3,), (1,)),
}


def _called_from(module: str, function: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Returns what the function gives when it is one of that module."""
    assert isinstance(function, FunctionType)
    moved = FunctionType(function.__code__, {"__name__": module, "torch": torch, "_ZEROS": _ZEROS})
    result = moved(like)
    assert isinstance(result, Tensor)
    return result


_ZEROS = filling(lambda: torch.zeros(3))


@pytest.mark.parametrize("name", _ALLOCATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_asked_for_by_the_package_are_nan(name: str, dtype: torch.dtype) -> None:
    memory = _called_from("fastrl.layers", _ALLOCATIONS[name], torch.zeros(3, dtype=dtype))
    assert memory.isnan().all()


@pytest.mark.parametrize(("dtype", "value"), [(torch.int64, 2**63 - 1), (torch.bool, True)])
def test_integers_asked_for_by_the_package_are_large(dtype: torch.dtype, value: int) -> None:
    memory = _called_from("fastrl", _ALLOCATIONS["empty_like"], torch.zeros(3, dtype=dtype))
    assert memory.tolist() == [value] * 3


def test_memory_of_others_is_left_alone() -> None:
    memory = _called_from("fastrlike", lambda like: _ZEROS(), torch.zeros(3))
    assert memory.tolist() == [0.0] * 3
