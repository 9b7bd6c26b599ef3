"""Running statistics of rows of logits: one read of the logits, nothing of their size written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import LogitTransform, VocabularyTile, ceil_div, next_power_of_2
from fastrl.kernels.launch import launch
from fastrl.kernels.merge import merge_partial_statistics
from fastrl.kernels.transform import LOG2_E, as_fp32, inverse_temperature_of, logit_and_slope

# With fewer rows one program per row leaves multiprocessors idle, and rows are split.
ROWS_TO_FILL_A_DEVICE = 512


def parts_per_row(num_rows: int, num_blocks: int) -> int:
    """Parts that a row of `num_blocks` blocks is split into, each the work of one program."""
    wanted = ceil_div(ROWS_TO_FILL_A_DEVICE, max(num_rows, 1))
    return max(min(wanted, num_blocks), 1)


def update_row_statistics(
    statistics: Tensor,  # [4, R] fp32, rows of it contiguous
    logits: Tensor,  # [R, S]
    labels: Tensor,  # [R]
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> None:
    """Merges a tile of the vocabulary into the running statistics, in place.

    z = cap(logit_scale (x + bias)) / temperature; statistics are m = max z, s = sum e^(z-m),
    u = sum (z-m) e^(z-m) and z[label], of the columns so far. One program reads one row (or one
    of several parts of a row, merged by a second kernel): 4 S bytes a row.

    Args:
        statistics: m = -inf, s = u = 0 before the first tile.
        logits: fp32 raw products x; rows may be strided, columns may not.
        labels: int64, of the whole vocabulary; one outside this tile matches nothing.
        transform: how products become z.
        tile: where the tile lies; its padding is not read.
        entropy: whether u is computed.
    """
    num_rows, num_columns = logits.shape[0], tile.num_columns
    if num_rows == 0 or num_columns == 0:
        return
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    assert statistics.stride(1) == 1 or num_rows == 1
    block = min(4096, max(next_power_of_2(num_columns), 128))
    num_blocks = ceil_div(num_columns, block)
    num_parts = parts_per_row(num_rows, num_blocks)
    partials = statistics
    if num_parts > 1:
        partials = statistics.new_empty(num_parts, 3, num_rows)
    launch(
        _row_statistics_kernel,
        (num_rows, num_parts),
        statistics=statistics,
        partials=partials,
        logits=logits,
        labels=labels,
        statistics_stride=statistics.stride(0),
        logits_stride=logits.stride(0),
        labels_stride=labels.stride(0),
        num_rows=num_rows,
        columns_per_part=ceil_div(num_blocks, num_parts) * block,
        ENTROPY=entropy,
        IS_PARTIAL=num_parts > 1,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
        **transform.launch_arguments(),
        **tile.launch_arguments(),
    )
    if num_parts > 1:
        merge_partial_statistics(statistics, partials, entropy=entropy)


def finish_row_statistics(
    statistics: Tensor,  # [4, R] fp32, rows of it contiguous
    rows: Tensor | None,  # [R]
    num_tokens: int,
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # [T] each
    """Log-probability, entropy and log-sum-exp of running statistics of the whole vocabulary.

        z[label] - m - log s,  log s - u / s,  m + log s

    Args:
        statistics: as of `update_row_statistics`.
        rows: where each of them goes, increasing; other places are 0. None: one after the other.
        num_tokens: places.
        entropy: whether u is there, and the entropy is computed.
    """
    if statistics.shape[1] == num_tokens:
        rows = None
    new = statistics.new_empty if rows is None else statistics.new_zeros
    logprobs, logsumexp = new(num_tokens), new(num_tokens)
    entropies = new(num_tokens) if entropy else None
    num_rows = statistics.shape[1]
    assert statistics.stride(1) == 1 or num_rows == 1
    if num_rows:
        block = 128
        launch(
            _finish_kernel,
            (ceil_div(num_rows, block),),
            statistics=statistics,
            rows=rows,
            logprobs=logprobs,
            entropies=entropies,
            logsumexp=logsumexp,
            statistics_stride=statistics.stride(0),
            num_rows=num_rows,
            HAS_ROWS=rows is not None,
            ENTROPY=entropy,
            BLOCK=block,
        )
    return logprobs, entropies, logsumexp


@triton.jit(do_not_specialize=["num_rows", "first_column", "statistics_stride"])
def _row_statistics_kernel(
    statistics,  # [4, R]
    partials,  # [num_parts, 3, R]
    logits,  # [R, S]
    labels,  # [R]
    bias,  # [S]
    temperature,  # [R] or a number
    statistics_stride,
    logits_stride,
    labels_stride,
    num_rows,
    first_column,
    num_columns,
    columns_per_part,
    softcap,
    logit_scale,
    HAS_BIAS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program goes through (a part of) a row in blocks, rescaled by a running maximum."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    num_rows = tl.cast(num_rows, tl.int64)
    softcap = as_fp32(softcap)
    logit_scale = as_fp32(logit_scale)
    inverse_temperature = inverse_temperature_of(row, True, temperature, ROW_TEMPERATURE)
    logits += row * logits_stride
    statistics += row
    statistics_stride = tl.cast(statistics_stride, tl.int64)
    if IS_PARTIAL:
        maximum = tl.full((), float("-inf"), tl.float32)
        sum_exp = tl.full((), 0.0, tl.float32)
        sum_shifted = tl.full((), 0.0, tl.float32)
    else:
        maximum = tl.load(statistics)
        sum_exp = tl.load(statistics + statistics_stride)
        sum_shifted = tl.load(statistics + 2 * statistics_stride)
    begin = part * columns_per_part
    end = tl.minimum(begin + columns_per_part, num_columns)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < end
        x = tl.load(logits + columns, mask=mask, other=0.0)
        if HAS_BIAS:
            x += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        z, _ = logit_and_slope(x, inverse_temperature, softcap, logit_scale, HAS_SOFTCAP)
        z = tl.where(mask, z, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(z, 0))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        shifted = z - shift
        exp = tl.exp2(shifted * LOG2_E)
        old_shift = maximum - shift
        old_scale = tl.exp2(old_shift * LOG2_E)
        sum_exp *= old_scale
        if ENTROPY:
            sum_shifted = sum_shifted * old_scale + tl.where(sum_exp > 0, old_shift * sum_exp, 0.0)
            sum_shifted += tl.sum(tl.where(exp > 0, shifted * exp, 0.0), 0)
        sum_exp += tl.sum(exp, 0)
        maximum = new_maximum
    if IS_PARTIAL:
        partials += part * 3 * num_rows + row
        tl.store(partials, maximum)
        tl.store(partials + num_rows, sum_exp)
        if ENTROPY:
            tl.store(partials + 2 * num_rows, sum_shifted)
    else:
        tl.store(statistics, maximum)
        tl.store(statistics + statistics_stride, sum_exp)
        if ENTROPY:
            tl.store(statistics + 2 * statistics_stride, sum_shifted)
    label = (tl.load(labels + row * labels_stride) - first_column).to(tl.int32)
    if (label >= begin) & (label < end):
        x = tl.load(logits + label)
        if HAS_BIAS:
            x += tl.load(bias + label).to(tl.float32)
        z, _ = logit_and_slope(x, inverse_temperature, softcap, logit_scale, HAS_SOFTCAP)
        tl.store(statistics + 3 * statistics_stride, z)


@triton.jit(do_not_specialize=["num_rows", "statistics_stride"])
def _finish_kernel(
    statistics,  # [4, R]
    rows,  # [R], or None
    logprobs,  # [T]
    entropies,  # [T], or None
    logsumexp,  # [T]
    statistics_stride,
    num_rows,
    HAS_ROWS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    stride = tl.cast(statistics_stride, tl.int64)
    statistics += row
    place = row
    if HAS_ROWS:
        place = tl.load(rows + row, mask=mask, other=0)
    m = tl.load(statistics, mask=mask, other=0.0)
    s = tl.load(statistics + stride, mask=mask, other=1.0)
    log_sum = tl.log(s)
    # Not label - logsumexp: two large numbers would lose the digits of log_sum.
    label = tl.load(statistics + 3 * stride, mask=mask, other=0.0)
    shifted = label - tl.where(m == float("-inf"), 0.0, m)
    tl.store(logprobs + place, shifted - log_sum, mask=mask)
    tl.store(logsumexp + place, m + log_sum, mask=mask)
    if ENTROPY:
        u = tl.load(statistics + 2 * stride, mask=mask, other=0.0)
        tl.store(entropies + place, log_sum - tl.div_rn(u, s), mask=mask)
