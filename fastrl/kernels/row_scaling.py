"""Small passes over [R, D]: rows times factors, scattered to their tokens; sums of columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import ceil_div, next_power_of_2
from fastrl.kernels.launch import launch

# Of a grid-strided pass: several per multiprocessor.
MAX_PROGRAMS = 1056


def scale_rows(
    values: Tensor,  # [R, D]
    factors: Tensor,  # [R]
    out_dtype: torch.dtype,
) -> Tensor:  # [R, D]
    """values * factors[:, None], computed in fp32 and rounded once."""
    output = torch.empty(values.shape, dtype=out_dtype, device=values.device)
    _launch_rows(output, values, factors, None)
    return output


def scatter_scaled_rows(
    output: Tensor,  # [T, D]
    values: Tensor,  # [R, D]
    factors: Tensor | None,  # [R]
    rows: Tensor,  # [R]
) -> None:
    """output[rows] = values * factors[:, None], computed in fp32 and rounded once; None is 1."""
    _launch_rows(output, values, factors, rows)


def _launch_rows(
    output: Tensor, values: Tensor, factors: Tensor | None, rows: Tensor | None
) -> None:
    num_rows, depth = values.shape
    if num_rows == 0 or depth == 0:
        return
    assert values.stride(1) == 1 or depth == 1
    assert output.stride(1) == 1 or depth == 1
    block = min(4096, next_power_of_2(depth))
    launch(
        _rows_kernel,
        (num_rows, ceil_div(depth, block)),
        output=output,
        values=values,
        factors=factors,
        rows=rows,
        output_stride=output.stride(0),
        values_stride=values.stride(0),
        depth=depth,
        HAS_FACTORS=factors is not None,
        HAS_ROWS=rows is not None,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _rows_kernel(
    output,  # [T, D]
    values,  # [R, D]
    factors,  # [R]
    rows,  # [R]
    output_stride,
    values_stride,
    depth,
    HAS_FACTORS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < depth
    scaled = tl.load(values + row * values_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        scaled *= tl.load(factors + row)
    target = row
    if HAS_ROWS:
        target = tl.load(rows + row)
    scaled = scaled.to(output.dtype.element_ty)
    tl.store(output + target * output_stride + columns, scaled, mask=mask)


def scale_in_place(
    tensors: Sequence[Tensor],  # of any shapes, contiguous
    factor: Tensor,  # scalar
) -> None:
    """tensor *= factor of each. A factor of exactly 1 is detected on the device: one launch a pair.

    The upstream gradient of a loss is nearly always 1; reading it on the host would synchronise.
    """
    assert all(tensor.is_contiguous() for tensor in tensors)
    tensors = [tensor for tensor in tensors if tensor.numel()]
    block = 4096
    for first, second in zip_longest(tensors[::2], tensors[1::2]):
        size = max(first.numel(), 0 if second is None else second.numel())
        launch(
            _scale_kernel,
            (min(ceil_div(size, block), MAX_PROGRAMS),),
            first=first,
            second=second,
            factor=factor,
            first_size=first.numel(),
            second_size=0 if second is None else second.numel(),
            HAS_SECOND=second is not None,
            BLOCK=block,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["first_size", "second_size"])
def _scale_kernel(
    first,
    second,  # or None
    factor,
    first_size,
    second_size,
    HAS_SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A grid-strided pass over each tensor, or none."""
    number = tl.load(factor).to(tl.float32)
    if number != 1.0:
        _scale(first, number, first_size, BLOCK)
        if HAS_SECOND:
            _scale(second, number, second_size, BLOCK)


@triton.jit
def _scale(tensor, number, size, BLOCK: tl.constexpr):
    num_programs = tl.num_programs(0).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, tl.cast(size, tl.int64), num_programs * BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < size
        scaled = tl.load(tensor + index, mask=mask, other=0.0).to(tl.float32) * number
        tl.store(tensor + index, scaled.to(tensor.dtype.element_ty), mask=mask)


def column_sums(
    matrix: Tensor,  # [R, S]
    factors: Tensor | None,  # [R]
) -> Tensor:  # [S] fp32
    """sum over rows of matrix * factors[:, None], in an order that depends on the shape alone."""
    num_rows, num_columns = matrix.shape
    sums = torch.zeros(num_columns, dtype=torch.float32, device=matrix.device)
    if num_rows == 0 or num_columns == 0:
        return sums
    assert matrix.stride(1) == 1 or num_columns == 1
    launch(
        _column_sums_kernel,
        (ceil_div(num_columns, 128),),
        sums=sums,
        matrix=matrix,
        factors=factors,
        matrix_stride=matrix.stride(0),
        num_rows=num_rows,
        num_columns=num_columns,
        HAS_FACTORS=factors is not None,
        BLOCK_ROWS=64,
        BLOCK_COLUMNS=128,
        num_warps=4,
    )
    return sums


@triton.jit
def _column_sums_kernel(
    sums,  # [S]
    matrix,  # [R, S]
    factors,  # [R]
    matrix_stride,
    num_rows,
    num_columns,
    HAS_FACTORS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program sums a block of columns."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = columns < num_columns
    total = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for start in range(0, num_rows, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & column_mask[None, :]
        address = rows.to(tl.int64)[:, None] * matrix_stride + columns[None, :]
        tile = tl.load(matrix + address, mask=mask, other=0.0).to(tl.float32)
        if HAS_FACTORS:
            tile *= tl.load(factors + rows, mask=row_mask, other=0.0)[:, None]
        total += tl.sum(tile, 0)
    tl.store(sums + columns, total, mask=column_mask)
