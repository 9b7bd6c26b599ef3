"""The training code run without data, as it allocates on a Hopper GPU: no GPU is needed.

Tensors are fake (`FakeTensorMode`: shapes and storages, no memory), so the sizes are real ones.
What only a GPU has is replaced by something that allocates the same: Triton's kernels by nothing,
since their outputs are allocated by their callers, FlexAttention by a function that saves what it
saves.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastrl import kernels
from fastrl.functional.batch import BatchKwargs
from fastrl.kernels import exponentials, linear, merge, row_gradient, row_scaling, row_statistics
from fastrl.models import attention


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that were made under it and are still alive.

    Attributes:
        live: bytes now.
        peak: most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        # By the storage: where it was made, and its bytes.
        self._blocks: dict[int, tuple[str, int]] = {}
        self._at_peak: dict[int, tuple[str, int]] = {}
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._patch = pytest.MonkeyPatch()

    def reset_peak(self) -> None:
        """Forgets the peak."""
        gc.collect()
        self.peak = 0
        self._note()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # so that it comes back with local tensors
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and _caller() == "_engine_run_backward":
            # Under a mode autograd adds gradients up out of place, else into the first one.
            key = id(args[0].untyped_storage())
            if key in self._blocks:
                self._resize(key, 0)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor, func)
        return result

    def _add(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        if self._known.get(storage._cdata) is storage:
            return
        self._known[storage._cdata] = storage
        self._blocks[id(storage)] = (_place(func), 0)
        weakref.finalize(storage, self._resize, id(storage), None)
        self._resize(id(storage), storage.nbytes())

    def _resize(self, key: int, num_bytes: int | None) -> None:
        """Notes the size of a storage, None where it is no more."""
        place, before = self._blocks.pop(key)
        # Blocks of CUDA's caching allocator.
        after = -(-(num_bytes or 0) // 512) * 512
        self.live += after - before
        if num_bytes is not None:
            self._blocks[key] = (place, after)
        if self.live > self.peak:
            self._note()

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if id(storage) in self._blocks:
                self._resize(id(storage), num_bytes)
            return result

        # How FSDP2 frees gathered parameters; it is no operator.
        self._patch.setattr(torch.UntypedStorage, "resize_", resize_)
        super().__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        self._patch.undo()

    def _note(self) -> None:
        self.peak = self.live
        self._at_peak = dict(self._blocks)

    def table(self, most: int = 25) -> str:
        """The largest storages at the peak, for a failing test."""
        counts = Counter(self._at_peak.values())
        rows = sorted(counts.items(), key=lambda item: -item[0][1] * item[1])[:most]
        return "\n".join(
            f"{num_bytes * count / 2**20:10.2f} MiB = {count:3d} x {num_bytes:12d}  {place}"
            for (place, num_bytes), count in rows
        )


def _caller() -> str:
    """The function that an operator came from, torch's own wrappers of the mode left out."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("inner", "_fn"):
        frame = frame.f_back
    return frame.f_code.co_name


def _place(func: Any) -> str:
    frame = sys._getframe(2)
    while frame is not None and "/fastrl/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return str(func)
    name = frame.f_code.co_filename.rsplit("/fastrl/", 1)[1]
    return f"{name}:{frame.f_lineno} {frame.f_code.co_name} {func}"


class _NoLaunch:
    """In a Triton kernel's place: launches are expressions that do nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _RMSNorm(torch.autograd.Function):
    """CUDA's: saves its input and the inverse root mean square of each row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight, states.new_empty(len(states), 1, dtype=torch.float32))
        return torch.empty_like(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        states, weight, _ = ctx.saved_tensors
        return torch.empty_like(states), torch.empty_like(weight)


class _FlexAttention(torch.autograd.Function):
    """Saves queries, keys, values, its output and the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)  # with its strides
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, logsumexp = ctx.saved_tensors
        delta = torch.empty_like(logsumexp)
        results = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        del delta
        return results


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    output: Tensor = _FlexAttention.apply(query, key, value)
    return output


@contextmanager
def hopper() -> Iterator[FakeTensorMode]:
    """Fake tensors that fastrl takes for those of a Hopper GPU."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        # Fake tensors are on the CPU: without CUDA autograd has no streams for anything else.
        patch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
        patch.setattr(kernels, "run_on_cpu", True)
        patch.setattr(kernels, "_capability", lambda device: (9, 0))
        patch.setattr(linear, "_Launch", lambda *_, **__: _nothing)
        for module, name in (
            (merge, "_merge_kernel"),
            (exponentials, "_finish_kernel"),
            (row_gradient, "_row_gradient_kernel"),
            (row_scaling, "_rows_kernel"),
            (row_scaling, "_scale_kernel"),
            (row_scaling, "_column_sums_kernel"),
            (row_statistics, "_row_statistics_kernel"),
            (row_statistics, "_finish_kernel"),
        ):
            assert hasattr(module, name), name
            patch.setattr(module, name, _NoLaunch())
        patch.setattr(F, "rms_norm", lambda x, shape, weight, eps: _RMSNorm.apply(x, weight))
        patch.setattr(attention, "_flex_refusal", lambda *_: None)
        patch.setattr(attention, "compiled_flex_attention", lambda: _flex_attention)
        yield mode


def fake_batch(mode: FakeTensorMode, batch: BatchKwargs) -> BatchKwargs:
    """The batch with fake tensors; what the host knows of it stays."""
    result: BatchKwargs = batch._map(mode.from_tensor)
    return result
