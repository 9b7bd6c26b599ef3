"""Triton kernels: tensors in, tensors out; no autograd, no config, no collectives.

`can_run` decides whether kernels run on a tensor. The modules with kernels import Triton and are
therefore imported only where it is True.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["can_run", "can_run_fused", "has_fused_layout"]

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Kernels also run on CPU tensors, in Triton's interpreter. It is slow, and only tests set this
# (with TRITON_INTERPRET=1 in the environment before Triton is imported).
run_on_cpu = False


def can_run(tensor: Tensor) -> bool:
    """Whether Triton kernels run on this tensor; float64 is left to PyTorch."""
    if not _HAS_TRITON or tensor.dtype not in KERNEL_DTYPES:
        return False
    if tensor.device.type == "cuda":
        return torch.version.hip is None
    return run_on_cpu and tensor.device.type == "cpu"


def can_run_fused(hidden_states: Tensor, weight: Tensor) -> bool:
    """Whether the products with epilogues (`linear`) run on these operands, and are the faster way.

    They need 16-bit rows that TMA can read, and are tuned and tested on Hopper only.
    """
    return has_fused_layout(hidden_states, weight) and min(len(hidden_states), len(weight)) > 0


def has_fused_layout(hidden_states: Tensor, weight: Tensor) -> bool:
    """`can_run_fused` for any number of rows and any alignment of the addresses.

    The same on all ranks of a tensor-parallel group, also where one holds no row of the vocabulary.
    """
    if not can_run(hidden_states) or hidden_states.dtype not in (torch.bfloat16, torch.float16):
        return False
    if hidden_states.is_cuda and _capability(hidden_states.device)[0] != 9:
        return False
    if not hidden_states.is_cuda and hidden_states.dtype == torch.bfloat16:
        return False  # the interpreter multiplies bf16 as integers
    depth = weight.shape[1]
    return (
        depth > 0
        and depth % 8 == 0
        and weight.stride(1) == 1
        and weight.stride(0) % 8 == 0
        and weight.stride(0) >= depth
    )


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


_HAS_TRITON = find_spec("triton") is not None
