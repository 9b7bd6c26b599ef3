"""Statistics and gradients of rows that have the logits of a few entries alone.

Multiplications and additions are not fused: z - z of two places is 0, so that a set of one entry
has a log-probability and a gradient of exactly 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import LogitTransform, RowGradients, VocabularyTile, ceil_div
from fastrl.kernels.launch import launch
from fastrl.kernels.transform import (
    LOG2_E,
    LOWEST,
    as_fp32,
    inverse_temperature_of,
    logit_and_slope,
)


def entry_statistics(
    products: Tensor,  # [N] fp32
    columns: Tensor,  # [N]; not below the tile's for an entry that is not there
    offsets: Tensor,  # [T + 1]
    labels: Tensor,  # [T] of the whole vocabulary
    transform: LogitTransform,
    tile: VocabularyTile,
) -> Tensor:  # [4, T] fp32
    """Running statistics of each slot's entries, summed in their order; of none where it has none.

    A program goes twice through the entries of a slot.
    """
    num_slots = len(labels)
    statistics = torch.empty(4, num_slots, dtype=torch.float32, device=products.device)
    if num_slots == 0:
        return statistics
    launch(
        _statistics_kernel,
        (num_slots,),
        statistics=statistics,
        products=products,
        columns=columns,
        offsets=offsets,
        labels=labels,
        labels_stride=labels.stride(0),
        num_slots=num_slots,
        BLOCK=64,
        num_warps=1,
        enable_fp_fusion=False,
        **transform.contiguous().launch_arguments(),
        **tile.launch_arguments(),
    )
    return statistics


@triton.jit
def _entry_columns(
    columns,  # [N]
    entries,
    mask,
    num_columns,
):
    """The columns of the entries, and which of them are there."""
    column = tl.load(columns + entries, mask=mask, other=num_columns)
    return column, column < num_columns


@triton.jit
def _entry_logits(
    products,  # [N]
    bias,  # [S]
    entries,
    column,
    is_there,
    inverse_temperature,
    softcap,
    logit_scale,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """z of the entries, and its slope."""
    product = tl.load(products + entries, mask=is_there, other=0.0)
    if HAS_BIAS:
        product += tl.load(bias + column, mask=is_there, other=0.0).to(tl.float32)
    return logit_and_slope(product, inverse_temperature, softcap, logit_scale, HAS_SOFTCAP)


@triton.jit
def _slot_logits(
    products,  # [N]
    columns,  # [N]
    bias,  # [S]
    start,
    end,
    inverse_temperature,
    softcap,
    logit_scale,
    num_columns,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z of the entries from `start` on, -inf for those that are not there, and their columns."""
    entries = start + tl.arange(0, BLOCK)
    column, is_there = _entry_columns(columns, entries, entries < end, num_columns)
    z, _ = _entry_logits(
        products, bias, entries, column, is_there, inverse_temperature, softcap, logit_scale,
        HAS_BIAS, HAS_SOFTCAP,
    )  # fmt: skip
    return tl.where(is_there, z, float("-inf")), column


@triton.jit(do_not_specialize=["first_column", "num_columns", "num_slots"])
def _statistics_kernel(
    statistics,  # [4, T]
    products,  # [N]
    columns,  # [N]
    offsets,  # [T + 1]
    labels,  # [T]
    bias,  # [S]
    temperature,  # [T] or a number
    labels_stride,
    first_column,
    num_columns,
    num_slots,
    softcap,
    logit_scale,
    HAS_BIAS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program reads the entries of a slot: 8 bytes each, twice."""
    slot = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets + slot), tl.load(offsets + slot + 1)
    label = tl.load(labels + slot * labels_stride) - first_column
    softcap, logit_scale = as_fp32(softcap), as_fp32(logit_scale)
    inverse_temperature = inverse_temperature_of(slot, True, temperature, ROW_TEMPERATURE)
    maximum = as_fp32(float("-inf"))
    label_logit = as_fp32(float("-inf"))
    for start in range(begin, end, BLOCK):
        z, column = _slot_logits(
            products, columns, bias, start, end, inverse_temperature, softcap, logit_scale,
            num_columns, HAS_BIAS, HAS_SOFTCAP, BLOCK,
        )  # fmt: skip
        maximum = tl.maximum(maximum, tl.max(z, 0))
        own = tl.where(column == label, z, float("-inf"))
        label_logit = tl.maximum(label_logit, tl.max(own, 0))
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    sum_exp = as_fp32(0.0)
    sum_shifted = as_fp32(0.0)
    for start in range(begin, end, BLOCK):
        z, _ = _slot_logits(
            products, columns, bias, start, end, inverse_temperature, softcap, logit_scale,
            num_columns, HAS_BIAS, HAS_SOFTCAP, BLOCK,
        )  # fmt: skip
        shifted = z - shift
        # Not `tl.maximum`, which would take a NaN for LOWEST.
        shifted = tl.where(shifted < LOWEST, LOWEST, shifted)
        exp = tl.exp2(shifted * LOG2_E)
        sum_exp += tl.sum(exp, 0)
        sum_shifted += tl.sum(shifted * exp, 0)
    statistics += slot
    tl.store(statistics, maximum)
    tl.store(statistics + num_slots, sum_exp)
    tl.store(statistics + 2 * num_slots, sum_shifted)
    tl.store(statistics + 3 * num_slots, label_logit)


def finish_rows(
    statistics: Tensor,  # [4, T] fp32
    is_row: Tensor,  # [T] bool
) -> tuple[Tensor, Tensor, Tensor]:  # [T] each
    """Log-probability, entropy and log-sum-exp as of `finish_statistics`; 0 outside of `is_row`."""
    num_slots = len(is_row)
    logprobs, entropy, logsumexp = (torch.empty_like(statistics[0]) for _ in range(3))
    block = 256
    launch(
        _finish_kernel,
        (ceil_div(max(num_slots, 1), block),),
        logprobs=logprobs,
        entropy=entropy,
        logsumexp=logsumexp,
        statistics=statistics,
        is_row=is_row,
        num_slots=num_slots,
        BLOCK=block,
        num_warps=4,
    )
    return logprobs, entropy, logsumexp


@triton.jit(do_not_specialize=["num_slots"])
def _finish_kernel(
    logprobs,  # [T]
    entropy,  # [T]
    logsumexp,  # [T]
    statistics,  # [4, T]
    is_row,  # [T]
    num_slots,
    BLOCK: tl.constexpr,
):
    """One program finishes a block of slots."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = slots < num_slots
    is_row = mask & (tl.load(is_row + slots, mask=mask, other=0) != 0)
    statistics += slots
    maximum = tl.load(statistics, mask=is_row, other=0.0)
    sum_exp = tl.load(statistics + num_slots, mask=is_row, other=1.0)
    sum_shifted = tl.load(statistics + 2 * num_slots, mask=is_row, other=0.0)
    label_logit = tl.load(statistics + 3 * num_slots, mask=is_row, other=0.0)
    log_sum = tl.log(sum_exp)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    tl.store(logprobs + slots, (label_logit - shift) - log_sum, mask=mask)
    tl.store(entropy + slots, log_sum - sum_shifted / sum_exp, mask=mask)
    tl.store(logsumexp + slots, maximum + log_sum, mask=mask)


def entry_gradient(
    products: Tensor,  # [N] fp32
    slots: Tensor,  # [N]
    columns: Tensor,  # [N]; not below the tile's for an entry that is not there
    labels: Tensor,  # [T]
    logsumexp: Tensor,  # [T]
    entropy: Tensor | None,  # [T], needed with a gradient of it
    gradients: RowGradients,  # of [T]
    transform: LogitTransform,
    tile: VocabularyTile,
) -> Tensor:  # [N] fp32
    """Gradient of the products as of `row_gradient`; 0 for entries that are not there."""
    grad = torch.empty_like(products)
    if len(grad) == 0:
        return grad
    assert gradients.entropy is None or entropy is not None
    block = 128
    launch(
        _gradient_kernel,
        (ceil_div(len(grad), block),),
        grad=grad,
        products=products,
        slots=slots,
        columns=columns,
        labels=labels,
        logsumexp=logsumexp,
        entropy=entropy,
        labels_stride=labels.stride(0),
        num_entries=len(grad),
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
        **gradients.launch_arguments(),
        **transform.contiguous().launch_arguments(),
        **tile.launch_arguments(),
    )
    return grad


@triton.jit(do_not_specialize=["first_column", "num_columns", "num_entries"])
def _gradient_kernel(
    grad,  # [N]
    products,  # [N]
    slots,  # [N]
    columns,  # [N]
    labels,  # [T]
    logsumexp,  # [T]
    entropy,  # [T]
    grad_logprobs,  # [T]
    grad_logsumexp,  # [T]
    grad_entropy,  # [T]
    bias,  # [S]
    temperature,  # [T] or a number
    labels_stride,
    grad_logprobs_stride,
    grad_logsumexp_stride,
    grad_entropy_stride,
    first_column,
    num_columns,
    num_entries,
    softcap,
    logit_scale,
    HAS_BIAS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_LOGSUMEXP: tl.constexpr,
    HAS_GRAD_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program differentiates a block of entries."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entries < num_entries
    softcap, logit_scale = as_fp32(softcap), as_fp32(logit_scale)
    column, is_there = _entry_columns(columns, entries, mask, num_columns)
    slot = tl.load(slots + entries, mask=is_there, other=0).to(tl.int64)
    inverse_temperature = inverse_temperature_of(slot, is_there, temperature, ROW_TEMPERATURE)
    z, slope = _entry_logits(
        products, bias, entries, column, is_there, inverse_temperature, softcap, logit_scale,
        HAS_BIAS, HAS_SOFTCAP,
    )  # fmt: skip
    lse = tl.load(logsumexp + slot, mask=is_there, other=0.0)
    log_p = z - tl.where(lse == float("-inf"), 0.0, lse)
    p = tl.exp2(log_p * LOG2_E)
    upstream = tl.load(grad_logprobs + slot * grad_logprobs_stride, mask=is_there, other=0.0)
    factor = -upstream
    if HAS_GRAD_LOGSUMEXP:
        factor += tl.load(grad_logsumexp + slot * grad_logsumexp_stride, mask=is_there, other=0.0)
    dz = factor * p
    if HAS_GRAD_ENTROPY:
        of_row = tl.load(entropy + slot, mask=is_there, other=0.0)
        of_entropy = tl.load(grad_entropy + slot * grad_entropy_stride, mask=is_there, other=0.0)
        dz -= of_entropy * tl.where(p > 0, p * (log_p + of_row), 0.0)
    label = tl.load(labels + slot * labels_stride, mask=is_there, other=-1) - first_column
    dz += tl.where(column == label, upstream, 0.0)
    tl.store(grad + entries, tl.where(is_there, dz * slope, 0.0), mask=mask)
