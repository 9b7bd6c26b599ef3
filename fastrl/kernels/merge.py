"""Merges statistics of parts of the vocabulary by a binary tree, of rows each on its own.

A part is a reference m, s = sum e^(z-m) and u = sum (z-m) e^(z-m). m need not be the part's
maximum; a part without a finite logit has m = -inf and s = u = 0, and merging it changes no bit of
another. So neighbours 2 i and 2 i + 1 are merged, then neighbours of those, and what a node holds
does not depend on how many absent parts stand beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import MOST_PARTS, ceil_div, next_power_of_2
from fastrl.kernels.launch import launch
from fastrl.kernels.transform import LOG2_E

# Parts times rows of a program: 96 registers a thread.
ELEMENTS = 4096


def merge_partial_statistics(
    statistics: Tensor,  # [4, R] fp32, rows of it contiguous
    partials: Tensor,  # [N, 3, R] fp32
    *,
    entropy: bool,
    accumulate: bool = True,
) -> None:
    """Merges the tree of N parts into the first three rows of the statistics, in place.

    Without `accumulate` what stood there is overwritten.
    """
    while partials.shape[0] > MOST_PARTS:
        nodes = ceil_div(partials.shape[0], MOST_PARTS)
        merged = partials.new_empty(nodes, 3, partials.shape[2])
        _launch(merged, partials, None, MOST_PARTS, entropy=entropy)
        partials = merged
    assert statistics.stride(1) == 1 or statistics.shape[1] == 1
    width = next_power_of_2(partials.shape[0])
    _launch(statistics[None], partials, None, width, entropy=entropy, accumulate=accumulate)


def merge_nodes(
    partials: Tensor,  # [N, 3, R] fp32
    slots: Tensor,  # [G, W] int32, W a power of two and at most MOST_PARTS
    *,
    entropy: bool,
) -> Tensor:  # [G, 3, R]
    """Roots of G trees, whose leaf w is part slots[g, w], or absent where that is -1."""
    nodes = partials.new_empty(slots.shape[0], 3, partials.shape[2])
    _launch(nodes, partials, slots, slots.shape[1], entropy=entropy)
    return nodes


def _launch(
    nodes: Tensor,  # [G, 3 or 4, R]
    partials: Tensor,  # [N, 3, R]
    slots: Tensor | None,
    width: int,
    *,
    entropy: bool,
    accumulate: bool = False,
) -> None:
    num_nodes, _, num_rows = nodes.shape
    if num_rows == 0 or num_nodes == 0:
        return
    assert partials.is_contiguous()
    block_rows = min(ELEMENTS // width, 32)
    launch(
        _merge_kernel,
        (ceil_div(num_rows, block_rows), num_nodes),
        nodes=nodes,
        partials=partials,
        slots=slots,
        node_stride=nodes.stride(0),
        statistic_stride=nodes.stride(1),
        num_parts=partials.shape[0],
        num_rows=num_rows,
        HAS_SLOTS=slots is not None,
        ENTROPY=entropy,
        ACCUMULATE=accumulate,
        BLOCK_ROWS=block_rows,
        WIDTH=width,
        LEVELS=width.bit_length() - 1,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows", "num_parts", "node_stride", "statistic_stride"])
def _merge_kernel(
    nodes,  # [G, 3 or 4, R]
    partials,  # [N, 3, R]
    slots,  # [G, WIDTH], or None: node g has the parts from g WIDTH on
    node_stride,
    statistic_stride,
    num_parts,
    num_rows,
    HAS_SLOTS: tl.constexpr,
    ENTROPY: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """A program merges the parts of a node for a few rows; 12 bytes read a part and row."""
    num_rows = tl.cast(num_rows, tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < num_rows
    node = tl.program_id(1).to(tl.int64)
    parts = node * WIDTH + tl.arange(0, WIDTH)
    if HAS_SLOTS:
        parts = tl.load(slots + parts).to(tl.int64)
    mask = ((parts >= 0) & (parts < num_parts))[:, None] & row_mask[None, :]
    address = partials + parts[:, None] * 3 * num_rows + rows[None, :]
    m = tl.load(address, mask=mask, other=float("-inf"))
    s = tl.load(address + num_rows, mask=mask, other=0.0)
    u = tl.zeros_like(s)
    if ENTROPY:
        u = tl.load(address + 2 * num_rows, mask=mask, other=0.0)
    for _ in tl.static_range(LEVELS):
        left_m, right_m = _neighbours(m)
        left_s, right_s = _neighbours(s)
        left_u, right_u = _neighbours(u)
        m, s, u = _merged(left_m, left_s, left_u, right_m, right_s, right_u, ENTROPY)
    m = tl.reshape(m, (BLOCK_ROWS,))
    s = tl.reshape(s, (BLOCK_ROWS,))
    u = tl.reshape(u, (BLOCK_ROWS,))
    statistic_stride = tl.cast(statistic_stride, tl.int64)
    nodes += node * node_stride + rows
    if ACCUMULATE:
        old_m = tl.load(nodes, mask=row_mask, other=float("-inf"))
        old_s = tl.load(nodes + statistic_stride, mask=row_mask, other=0.0)
        old_u = tl.zeros_like(old_s)
        if ENTROPY:
            old_u = tl.load(nodes + 2 * statistic_stride, mask=row_mask, other=0.0)
        m, s, u = _merged(old_m, old_s, old_u, m, s, u, ENTROPY)
    tl.store(nodes, m, mask=row_mask)
    tl.store(nodes + statistic_stride, s, mask=row_mask)
    if ENTROPY:
        tl.store(nodes + 2 * statistic_stride, u, mask=row_mask)


@triton.jit
def _neighbours(x):
    """Elements 2 i and 2 i + 1 of the first dimension of [2 n, R], as two of [n, R]."""
    HALF: tl.constexpr = x.shape[0] // 2
    ROWS: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (HALF, 2, ROWS)), (0, 2, 1)))


@triton.jit
def _merged(m1, s1, u1, m2, s2, u2, ENTROPY: tl.constexpr):
    """Two parts as one. Sums are explicit `fma`: left to a compiler, bits would be its choice."""
    m = tl.maximum(m1, m2)
    shift = tl.where(m == float("-inf"), 0.0, m)
    shift1 = m1 - shift
    shift2 = m2 - shift
    # Square roots of the scales, applied twice: a part with a reference far below another's may
    # hold the larger logits, and its scale alone would underflow.
    root1 = tl.exp2(shift1 * (0.5 * LOG2_E))
    root2 = tl.exp2(shift2 * (0.5 * LOG2_E))
    s1 = s1 * root1 * root1
    s2 = s2 * root2
    s = tl.fma(s2, root2, s1)
    u = u1
    if ENTROPY:
        u = tl.fma(u2 * root2, root2, u1 * root1 * root1)
        # An absent part has shift -inf: its product would be NaN.
        s2 *= root2
        u = tl.fma(tl.where(s1 > 0, shift1, 0.0), s1, u)
        u = tl.fma(tl.where(s2 > 0, shift2, 0.0), s2, u)
    return m, s, u
