"""Merges statistics of parts of the vocabulary into the running statistics of whole rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import ceil_div
from fastrl.kernels.transform import LOG2_E


def merge_partial_statistics(
    statistics: Tensor,  # [4, R] fp32, rows of it contiguous
    partials: Tensor,  # [N, 3, R] fp32
    *,
    entropy: bool,
) -> None:
    """Merges N parts into the first three rows of the statistics, in place.

    A part is a reference m, s = sum e^(z-m) and u = sum (z-m) e^(z-m). m need not be the part's
    maximum; a part without a finite logit has m = -inf and s = u = 0. The order of summation
    depends on N alone: results are deterministic.
    """
    num_rows = statistics.shape[1]
    if num_rows == 0:
        return
    assert statistics.stride(1) == 1 or num_rows == 1
    assert partials.is_contiguous()
    block_rows = 32
    _merge_kernel[(ceil_div(num_rows, block_rows),)](
        statistics=statistics,
        partials=partials,
        statistics_stride=statistics.stride(0),
        num_parts=partials.shape[0],
        num_rows=num_rows,
        ENTROPY=entropy,
        BLOCK_ROWS=block_rows,
        BLOCK_PARTS=16,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows", "num_parts", "statistics_stride"])
def _merge_kernel(
    statistics,  # [4, R]
    partials,  # [N, 3, R]
    statistics_stride,
    num_parts,
    num_rows,
    ENTROPY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """A program merges all parts of a few rows; 12 bytes read a part and row."""
    num_rows = tl.cast(num_rows, tl.int64)
    statistics_stride = tl.cast(statistics_stride, tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < num_rows
    statistics += rows
    maximum = tl.load(statistics, mask=row_mask, other=float("-inf"))
    sum_exp = tl.load(statistics + statistics_stride, mask=row_mask, other=0.0)
    sum_shifted = tl.load(statistics + 2 * statistics_stride, mask=row_mask, other=0.0)
    for start in range(0, num_parts, BLOCK_PARTS):
        parts = start + tl.arange(0, BLOCK_PARTS).to(tl.int64)
        mask = (parts < num_parts)[:, None] & row_mask[None, :]
        address = partials + parts[:, None] * 3 * num_rows + rows[None, :]
        part_maximum = tl.load(address, mask=mask, other=float("-inf"))
        part_sum = tl.load(address + num_rows, mask=mask, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        # Square roots of the scales, applied twice: a part with a reference far below another's may
        # hold the larger logits, and its scale alone would underflow.
        old_shift = maximum - shift
        old_root = tl.exp2(old_shift * (0.5 * LOG2_E))
        part_shift = part_maximum - shift[None, :]
        part_root = tl.exp2(part_shift * (0.5 * LOG2_E))
        part_sum = part_sum * part_root * part_root
        sum_exp = sum_exp * old_root * old_root
        if ENTROPY:
            part_u = tl.load(address + 2 * num_rows, mask=mask, other=0.0)
            part_u = part_u * part_root * part_root
            part_u += tl.where(part_sum > 0, part_shift * part_sum, 0.0)
            sum_shifted = sum_shifted * old_root * old_root
            sum_shifted += tl.where(sum_exp > 0, old_shift * sum_exp, 0.0)
            sum_shifted += tl.sum(part_u, 0)
        sum_exp += tl.sum(part_sum, 0)
        maximum = new_maximum
    tl.store(statistics, maximum, mask=row_mask)
    tl.store(statistics + statistics_stride, sum_exp, mask=row_mask)
    if ENTROPY:
        tl.store(statistics + 2 * statistics_stride, sum_shifted, mask=row_mask)
