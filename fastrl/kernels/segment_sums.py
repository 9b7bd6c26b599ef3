"""Sums of scaled rows by segments in a fixed order; rows with a factor of 0 are no work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import ceil_div, next_power_of_2
from fastrl.kernels.launch import launch

# Pairs of a segment that one program sums: the longest are split, always in the same places.
LONGEST = 256


def add_segments(
    output: Tensor,  # [S, D]
    segments: Tensor,  # [N] in rising order
    order: Tensor,  # [N]
    factors: Tensor,  # [M] fp32
    source: Tensor,  # [K, D]
    rows: Tensor,  # [M]
    *,
    onto_zeros: bool,
) -> None:
    """output[s] += sum of factors[i] source[rows[i]] over the i = order[n] of segment s.

    In fp32, in the order of the pairs, and rounded once to output's dtype. What has no factor other
    than 0 is neither read nor written; pairs of segments from S on are left out. Output is not read
    where it is said to be 0 (`onto_zeros`).
    """
    num_pairs, depth = segments.shape[0], output.shape[1]
    if num_pairs == 0 or depth == 0 or len(output) == 0:
        return
    assert output.stride(1) == 1 or depth == 1
    assert source.stride(1) == 1 or depth == 1
    block = min(1024, next_power_of_2(depth))
    num_blocks, num_windows = ceil_div(depth, block), ceil_div(num_pairs, LONGEST)
    partials = torch.empty(num_windows, depth, dtype=torch.float32, device=output.device)
    arguments = {
        "partials": partials,
        "segments": segments,
        "order": order,
        "factors": factors,
        "source": source,
        "rows": rows,
        "source_stride": source.stride(0),
        "num_pairs": num_pairs,
        "num_segments": len(output),
        "depth": depth,
        "LONGEST": LONGEST,
        "BLOCK_PAIRS": 4,
        "BLOCK_DEPTH": block,
        "num_warps": 4,
    }
    if num_windows > 1:
        launch(_partials_kernel, (num_windows, num_blocks), **arguments)
    starts = 8
    launch(
        _segments_kernel,
        (ceil_div(num_pairs, starts), num_blocks),
        output=output,
        output_stride=output.stride(0),
        ONTO_ZEROS=onto_zeros,
        BLOCK_STARTS=starts,
        **arguments,
    )


@triton.jit
def _scaled_sum(
    source,  # [K, D]
    rows,
    entries,
    factor,
    along,
    depth,
    source_stride,
):
    """Sum of the source's rows of some entries times their factors; of factor 0 none is read."""
    is_used = factor != 0.0
    row = tl.load(rows + entries, mask=is_used, other=0).to(tl.int64)
    address = row[:, None] * source_stride + along[None, :]
    mask = is_used[:, None] & (along < depth)[None, :]
    values = tl.load(source + address, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(factor[:, None] * values, 0)


@triton.jit
def _sum_of_pairs(
    segments,
    order,
    factors,
    source,
    rows,
    key,
    start,
    stop,
    along,
    depth,
    source_stride,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Sum of the pairs [start, stop) up to the end of their segment, and whether there is any."""
    total = tl.zeros((BLOCK_DEPTH,), tl.float32)
    is_any = tl.full((), 0, tl.int32)
    position = start
    goes_on = position < stop
    while goes_on:
        pairs = position + tl.arange(0, BLOCK_PAIRS)
        is_own = tl.load(segments + pairs, mask=pairs < stop, other=-1) == key
        entry = tl.load(order + pairs, mask=is_own, other=0)
        factor = tl.load(factors + entry, mask=is_own, other=0.0)
        total += _scaled_sum(source, rows, entry, factor, along, depth, source_stride)
        is_any = tl.maximum(is_any, tl.max((factor != 0.0).to(tl.int32), 0))
        position += BLOCK_PAIRS
        goes_on = (position < stop) & (tl.min(is_own.to(tl.int32), 0) == 1)
    return total, is_any


@triton.jit(do_not_specialize=["num_pairs", "num_segments"])
def _partials_kernel(
    partials,  # [windows, D]
    segments,  # [N]
    order,  # [N]
    factors,  # [M]
    source,  # [K, D]
    rows,  # [M]
    source_stride,
    num_pairs,
    num_segments,
    depth,
    LONGEST: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program sums the piece of a long segment that begins in its window, if one does.

    A segment's pieces begin every LONGEST pairs from its start on; the first is left out.
    """
    num_pairs = tl.cast(num_pairs, tl.int64)
    window = tl.program_id(0).to(tl.int64) * LONGEST
    key = tl.load(segments + window)
    if key < num_segments:
        # The segment's start, by bisection: the first pair that is not below its number.
        low, high = window * 0, window
        while low < high:
            middle = (low + high) // 2
            is_below = tl.load(segments + middle) < key
            low = tl.where(is_below, middle + 1, low)
            high = tl.where(is_below, high, middle)
        start = low + tl.cdiv(window - low, LONGEST) * LONGEST
        is_own = tl.load(segments + start, mask=start < num_pairs, other=-1) == key
        if (low < window) & is_own:
            along = tl.program_id(1) * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
            stop = tl.minimum(start + LONGEST, num_pairs)
            total, _ = _sum_of_pairs(
                segments, order, factors, source, rows, key, start, stop, along, depth,
                source_stride, BLOCK_PAIRS, BLOCK_DEPTH,
            )  # fmt: skip
            place = partials + (window // LONGEST) * depth + along
            tl.store(place, total, mask=along < depth)


@triton.jit(do_not_specialize=["num_pairs", "num_segments"])
def _segments_kernel(
    output,  # [S, D]
    partials,  # [windows, D]
    segments,  # [N]
    order,  # [N]
    factors,  # [M]
    source,  # [K, D]
    rows,  # [M]
    output_stride,
    source_stride,
    num_pairs,
    num_segments,
    depth,
    LONGEST: tl.constexpr,
    ONTO_ZEROS: tl.constexpr,
    BLOCK_STARTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program sums the segments that begin at its pairs, for a block of columns."""
    num_pairs = tl.cast(num_pairs, tl.int64)
    along = tl.program_id(1) * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
    first = tl.program_id(0).to(tl.int64) * BLOCK_STARTS
    for number in range(BLOCK_STARTS):
        pair = first + number
        is_pair = pair < num_pairs
        key = tl.load(segments + pair, mask=is_pair, other=num_segments)
        before = tl.load(segments + pair - 1, mask=is_pair & (pair > 0), other=-1)
        if (key < num_segments) & (key != before):
            stop = tl.minimum(pair + LONGEST, num_pairs)
            total, is_any = _sum_of_pairs(
                segments, order, factors, source, rows, key, pair, stop, along, depth,
                source_stride, BLOCK_PAIRS, BLOCK_DEPTH,
            )  # fmt: skip
            piece = pair + LONGEST
            goes_on = tl.load(segments + piece, mask=piece < num_pairs, other=-1) == key
            while goes_on:
                place = partials + (piece // LONGEST) * depth + along
                total += tl.load(place, mask=along < depth, other=0.0)
                is_any = tl.full((), 1, tl.int32)
                piece += LONGEST
                goes_on = tl.load(segments + piece, mask=piece < num_pairs, other=-1) == key
            if is_any == 1:
                address = output + key.to(tl.int64) * output_stride + along
                if not ONTO_ZEROS:
                    total += tl.load(address, mask=along < depth, other=0.0).to(tl.float32)
                tl.store(address, total.to(output.dtype.element_ty), mask=along < depth)


def write_rows(
    output: Tensor,  # [R, D], or [T, D]
    slots: Tensor,  # [R] of T
    offsets: Tensor,  # [T + 1]
    factors: Tensor,  # [N] fp32
    source: Tensor,  # [K, D]
    columns: Tensor,  # [N]
    *,
    at_slots: bool,
) -> None:
    """output[r], or output[slots[r]], = sum of factors source[columns] over the slot's entries.

    In fp32, in the order of the entries, and rounded once; source rows of factor 0 are not read.
    """
    depth = output.shape[1]
    if len(slots) == 0 or depth == 0:
        return
    assert output.stride(1) == 1 or depth == 1
    assert source.stride(1) == 1 or depth == 1
    block = min(1024, next_power_of_2(depth))
    launch(
        _rows_kernel,
        (len(slots), ceil_div(depth, block)),
        output=output,
        slots=slots,
        offsets=offsets,
        factors=factors,
        source=source,
        columns=columns,
        output_stride=output.stride(0),
        source_stride=source.stride(0),
        depth=depth,
        AT_SLOTS=at_slots,
        BLOCK_PAIRS=8,
        BLOCK_DEPTH=block,
        num_warps=4,
    )


@triton.jit
def _rows_kernel(
    output,  # [R, D] or [T, D]
    slots,  # [R]
    offsets,  # [T + 1]
    factors,  # [N]
    source,  # [K, D]
    columns,  # [N]
    output_stride,
    source_stride,
    depth,
    AT_SLOTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program sums the entries of a slot, for a block of columns."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    begin, end = tl.load(offsets + slot), tl.load(offsets + slot + 1)
    along = tl.program_id(1) * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
    total = tl.zeros((BLOCK_DEPTH,), tl.float32)
    for start in range(begin, end, BLOCK_PAIRS):
        entries = start + tl.arange(0, BLOCK_PAIRS)
        factor = tl.load(factors + entries, mask=entries < end, other=0.0)
        total += _scaled_sum(source, columns, entries, factor, along, depth, source_stride)
    if AT_SLOTS:
        row = slot
    address = output + row * output_stride + along
    tl.store(address, total.to(output.dtype.element_ty), mask=along < depth)
