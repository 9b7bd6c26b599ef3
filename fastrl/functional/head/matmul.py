"""Matrix products of low-precision operands with fp32 results."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.kernels.arguments import PART_COLUMNS, ceil_div


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


# Rows of a product of `matmul_alike`, on a CPU and on a GPU.
_CPU_ROWS, _GPU_ROWS = 64, 512
# Rows at multiples of 64 bytes: vector instructions then see each of them alike.
_DEPTH_MULTIPLE = 16


def matmul_alike(
    a: Tensor,  # [M, K]
    b: Tensor,  # [N, K]
) -> Tensor:  # [M, N]
    """`matmul` of a and b^T, an element of which depends on its two rows alone.

    BLAS chooses kernels, and with them the order of a sum, by the shape of a product: all products
    here have one shape, and what is missing is 0.
    """
    rows = _GPU_ROWS if a.is_cuda else _CPU_ROWS
    num_rows = len(a)
    dtype = accumulation_dtype(a.dtype)
    a = _padded(a if a.is_cuda else a.to(dtype), rows)
    num_columns = ceil_div(len(b), PART_COLUMNS) * PART_COLUMNS
    result = torch.empty(len(a), num_columns, dtype=dtype, device=a.device)
    for column in range(0, len(b), PART_COLUMNS):
        columns = slice(column, column + PART_COLUMNS)
        part = _padded(b[columns].to(a.dtype), PART_COLUMNS).t()
        for row in range(0, len(a), rows):
            result[row : row + rows, columns] = matmul(a[row : row + rows], part)
    return result[:num_rows, : len(b)]


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    """A copy with zeros up to a multiple of rows and of depth."""
    rows, depth = (
        ceil_div(size, step) * step
        for size, step in zip(matrix.shape, (multiple, _DEPTH_MULTIPLE), strict=True)
    )
    padded = matrix.new_zeros(rows, depth)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


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
