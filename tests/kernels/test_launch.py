"""Launches past Triton's dispatch: never a kernel that Triton would not have chosen."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fastrl.kernels import launch as module
from fastrl.kernels.launch import launch


def _add(x, y, size, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel that is never compiled."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is compiled, and what is launched of it, by fakes."""
    found: list[tuple[str, Any]] = []

    class Compiled:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments: found.append(("launched", (grid, arguments)))

    def run(self: Any, *, grid: Any, warmup: bool, **arguments: Any) -> Any:
        found.append(("compiled", (grid, arguments)))
        return Compiled()

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_known", {})
    return found


def kernel() -> JITFunction[Any]:
    return JITFunction(_add, do_not_specialize=["count"])


def test_a_second_launch_of_the_same_facts_takes_what_was_compiled(
    calls: list[tuple[str, Any]],
) -> None:
    add, x, y = kernel(), torch.zeros(8), torch.ones(8)
    first: dict[str, Any] = {"x": x, "y": None, "size": 32, "count": 5, "BLOCK": 4}
    launch(add, (3,), **first, num_warps=4)
    launch(add, (7, 2), x=y, y=None, size=48, count=1, BLOCK=4, num_warps=4)
    assert [kind for kind, _ in calls] == ["compiled", "launched"]
    grid, arguments = calls[1][1]
    assert grid == (7, 2, 1)
    assert arguments[0] is y
    assert arguments[1:] == (None, 48, 1, 4)
    launch(add, (1,), y=None, x=x, size=32, count=5, BLOCK=4, num_warps=4)
    assert calls[-1][0] == "compiled"  # in another order


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(8, dtype=torch.float16)},
        {"x": torch.zeros(8)[1:]},
        {"x": None},
        {"y": torch.zeros(8)},
        {"size": 33},
        {"size": 1},
        {"size": 2**40},
        {"count": 2**31},
        {"size": 2.0},
        {"BLOCK": 8},
        {"BLOCK": 4.0},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_other_facts_are_compiled(changes: dict[str, Any], calls: list[tuple[str, Any]]) -> None:
    add = kernel()
    first: dict[str, Any] = {"x": torch.zeros(8), "y": None, "size": 32, "count": 5, "BLOCK": 4}
    for arguments in (first, {**first, "num_warps": 4, **changes}):
        launch(add, (1,), **{"num_warps": 4, **arguments})
    assert [kind for kind, _ in calls] == ["compiled", "compiled"]


def test_another_device_is_compiled_for(
    calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = kernel()
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch(add, (1,), x=None, y=None, size=32, count=5, BLOCK=4)
    assert [kind for kind, _ in calls] == ["compiled", "compiled", "launched"]


def test_facts_tell_apart_what_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over pairs of values, by Triton's own look at an argument."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    base = torch.zeros(64, 64, dtype=torch.float16)
    values: list[Any] = [
        *(0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**32, 2**40 + 16, -1, -16, -(2**31)),
        *(0.0, 1.0, 16.0, None, True, False, 2**63, 2**63 + 16),
        *(torch.zeros(32, dtype=dtype)[k:] for dtype in (torch.int64, torch.bfloat16, torch.float32)
          for k in (0, 1, 2, 4, 8)),
        *(TensorDescriptor.from_tensor(base.to(dtype), [rows, 16])
          for dtype in (torch.float16, torch.bfloat16) for rows in (16, 32)),
    ]  # fmt: skip
    triton_own = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    for specialized, name in ((True, "size"), (False, "count")):
        known = module._Kernel(kernel())
        for first, second in combinations(values, 2):
            chosen = [triton_own(BaseBackend, each, False, specialized, True)
                      for each in (first, second)]  # fmt: skip
            if chosen[0] != chosen[1]:
                facts = [known.facts({name: each}) for each in (first, second)]
                assert facts[0] != facts[1], (first, second, chosen)
