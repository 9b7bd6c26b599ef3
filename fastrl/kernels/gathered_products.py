"""Products of pairs of rows: work proportional to the pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import ceil_div, next_power_of_2
from fastrl.kernels.launch import launch


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
    block = 16
    launch(
        _products_kernel,
        (ceil_div(num_pairs, block),),
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
        BLOCK_DEPTH=min(128, next_power_of_2(max(depth, 1))),
        num_warps=4,
    )
    return products


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
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
