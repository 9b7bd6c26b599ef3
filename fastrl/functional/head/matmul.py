"""Matrix products of low-precision operands with fp32 results."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of logits, statistics and sums: at least fp32; float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
) -> Tensor:  # [M, N]
    """a b in `accumulation_dtype`, without rounding the result to the operands' dtype."""
    if _has_wide_results(a, b):
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = accumulation_dtype(b.dtype)
    return a.to(dtype) @ b.to(dtype)


def matmul_rounded(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
    *,
    out: Tensor,  # [M, N]
) -> None:
    """out = a b, summed in `accumulation_dtype` and rounded once to out's dtype."""
    dtype = accumulation_dtype(b.dtype)
    if _has_wide_results(a, b) and out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif _has_wide_results(a, b) and out.dtype == dtype:
        torch.mm(a, b, out_dtype=dtype, out=out)
    elif out.dtype == dtype:
        torch.mm(a.to(dtype), b.to(dtype), out=out)
    else:
        out.copy_(matmul(a, b))


def add_matmul_(
    total: Tensor,  # [M, N] in accumulation_dtype
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
) -> None:
    """total += a b, summed in `total`'s dtype."""
    if _has_wide_results(a, b):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _has_wide_results(a: Tensor, b: Tensor) -> bool:
    """Whether `torch.mm` of these operands can return its fp32 sums unrounded."""
    return a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
