"""Tensors to a GPU in one copy: allocating page-locked memory may wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT = 16


def send(
    tensors: Sequence[Tensor], device: torch.device | str, *, pin_memory: bool = True
) -> list[Tensor]:
    """Copies of CPU tensors on `device`, parts of one buffer that is sent without waiting.

    Args:
        tensors: contiguous or not, of any dtypes and shapes.
        device: to send to.
        pin_memory: whether the buffer is page-locked, as a GPU needs for a copy without waiting.
    """
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    ends = list(accumulate(sizes, initial=0))
    buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pin_memory)
    for tensor, start in zip(tensors, ends, strict=False):
        _part(buffer, start, tensor).copy_(tensor)
    sent = buffer.to(device, non_blocking=True)
    return [_part(sent, start, tensor) for tensor, start in zip(tensors, ends, strict=False)]


def _part(buffer: Tensor, start: int, tensor: Tensor) -> Tensor:
    """The bytes from `start` on as a tensor like `tensor`."""
    part = buffer[start : start + tensor.nbytes]
    return part.view(tensor.dtype).view(tensor.shape)
