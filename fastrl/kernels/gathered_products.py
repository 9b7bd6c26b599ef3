"""Products of pairs of rows, sums of scaled rows by segments: work proportional to the pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def gathered_products(
    hidden: Tensor,  # [R, D]
    weight: Tensor,  # [V, D]
    rows: Tensor,  # [N]
    columns: Tensor,  # [N]
) -> Tensor:  # [N] fp32
    """sum_d hidden[rows, d] weight[columns, d], in an order that depends on D alone.

    Pairs whose row is not below R are left out; their product is 0.
    """
    num_pairs, depth = rows.shape[0], hidden.shape[1]
    products = torch.empty(num_pairs, dtype=torch.float32, device=hidden.device)
    if num_pairs == 0:
        return products
    assert hidden.stride(1) == 1 or depth == 1
    assert weight.stride(1) == 1 or depth == 1
    block = 8
    _products_kernel[(triton.cdiv(num_pairs, block),)](
        products=products,
        hidden=hidden,
        weight=weight,
        rows=rows,
        columns=columns,
        hidden_stride=hidden.stride(0),
        weight_stride=weight.stride(0),
        num_pairs=num_pairs,
        num_rows=hidden.shape[0],
        depth=depth,
        BLOCK_PAIRS=block,
        BLOCK_DEPTH=min(512, triton.next_power_of_2(max(depth, 1))),
        num_warps=4,
    )
    return products


@triton.jit
def _products_kernel(
    products,  # [N]
    hidden,  # [R, D]
    weight,  # [V, D]
    rows,  # [N]
    columns,  # [N]
    hidden_stride,
    weight_stride,
    num_pairs,
    num_rows,
    depth,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program multiplies a block of pairs."""
    pairs = tl.program_id(0).to(tl.int64) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    in_range = pairs < num_pairs
    row = tl.load(rows + pairs, mask=in_range, other=num_rows).to(tl.int64)
    is_there = row < num_rows
    column = tl.load(columns + pairs, mask=is_there, other=0).to(tl.int64)
    total = tl.zeros((BLOCK_PAIRS,), tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        along = start + tl.arange(0, BLOCK_DEPTH)
        mask = is_there[:, None] & (along < depth)[None, :]
        left_address = row[:, None] * hidden_stride + along[None, :]
        right_address = column[:, None] * weight_stride + along[None, :]
        left = tl.load(hidden + left_address, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(weight + right_address, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(left * right, 1)
    tl.store(products + pairs, total, mask=in_range)


def add_segments(
    output: Tensor,  # [S, D]
    segments: Tensor,  # [N] in rising order
    factors: Tensor,  # [N] fp32
    source: Tensor,  # [M, D]
    rows: Tensor,  # [N]
    first: int = 0,
) -> None:
    """output[s] = sum of factors source[rows] over the pairs of segment first + s.

    In fp32, in the order of the pairs, rounded once to output's dtype. Segments without a pair are
    left as they are; pairs of other segments are left out.
    """
    num_pairs, depth = rows.shape[0], output.shape[1]
    if num_pairs == 0 or depth == 0 or len(output) == 0:
        return
    assert output.stride(1) == 1 or depth == 1
    assert source.stride(1) == 1 or depth == 1
    block = min(1024, triton.next_power_of_2(depth))
    _segments_kernel[(num_pairs, triton.cdiv(depth, block))](
        output=output,
        segments=segments,
        ends=torch.searchsorted(segments, segments, right=True),
        factors=factors,
        source=source,
        rows=rows,
        output_stride=output.stride(0),
        source_stride=source.stride(0),
        first=first,
        num_segments=len(output),
        depth=depth,
        BLOCK_PAIRS=8,
        BLOCK_DEPTH=block,
        num_warps=4,
    )


@triton.jit
def _segments_kernel(
    output,  # [S, D]
    segments,  # [N]
    ends,  # [N]
    factors,  # [N]
    source,  # [M, D]
    rows,  # [N]
    output_stride,
    source_stride,
    first,
    num_segments,
    depth,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program sums the segment that begins at its pair, if one does, for a block of columns."""
    pair = tl.program_id(0).to(tl.int64)
    key = tl.load(segments + pair)
    segment = (key - first).to(tl.int64)
    before = tl.load(segments + tl.maximum(pair - 1, 0))
    begins = (pair == 0) | (before != key)
    if begins & (segment >= 0) & (segment < num_segments):
        end = tl.load(ends + pair)
        along = tl.program_id(1) * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
        depth_mask = along < depth
        total = tl.zeros((BLOCK_DEPTH,), tl.float32)
        for start in range(pair, end, BLOCK_PAIRS):
            pairs = start + tl.arange(0, BLOCK_PAIRS)
            pair_mask = pairs < end
            factor = tl.load(factors + pairs, mask=pair_mask, other=0.0)
            row = tl.load(rows + pairs, mask=pair_mask, other=0)
            address = row[:, None] * source_stride + along[None, :]
            mask = pair_mask[:, None] & depth_mask[None, :]
            values = tl.load(source + address, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(factor[:, None] * values, 0)
        result = total.to(output.dtype.element_ty)
        tl.store(output + segment * output_stride + along, result, mask=depth_mask)
