"""Gradient of rows of raw products, written over the logits where it fits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import (
    LogitTransform,
    RowGradients,
    VocabularyTile,
    ceil_div,
    next_power_of_2,
)
from fastrl.kernels.launch import launch
from fastrl.kernels.row_statistics import parts_per_row
from fastrl.kernels.transform import LOG2_E, as_fp32, inverse_temperature_of, logit_and_slope


def row_gradient(
    logits: Tensor,  # [R, S] fp32
    labels: Tensor,  # [R]
    logsumexp: Tensor,  # [R]
    entropy: Tensor | None,  # [R]
    gradients: RowGradients,
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    operand_dtype: torch.dtype,
) -> Tensor:  # [R, S] operand_dtype
    """Gradient of the raw products x of a tile, destroying `logits`.

    dz = g_logprob (onehot - p) + g_logsumexp p - g_entropy p (log p + entropy), p = e^(z - lse),
    then through temperature, cap and scale. Columns of padding get exactly 0.

    With many rows the result is a view into the storage of `logits`, with their row stride in
    bytes: a program goes through a row from left to right, and its writes stay behind its reads.
    With few rows, rows are split over programs and the result is new memory. 4 S bytes read and
    2 S written a row for a 16-bit result.

    `logits`, `labels`, `transform` and `tile` are as in `update_row_statistics`. `logsumexp` and
    `entropy`, needed with a gradient of it, are of z over the whole vocabulary, in fp32 like
    the upstream `gradients`. `operand_dtype` is no wider than that of `logits`.
    """
    num_rows, total_columns = logits.shape
    assert logits.stride(1) == 1 or total_columns == 1
    assert operand_dtype.itemsize <= logits.dtype.itemsize
    assert gradients.entropy is None or entropy is not None
    block = min(4096, max(next_power_of_2(total_columns), 128))
    num_blocks = ceil_div(total_columns, block)
    num_parts = parts_per_row(num_rows, num_blocks)
    if num_parts > 1:
        output = torch.empty(num_rows, total_columns, dtype=operand_dtype, device=logits.device)
    else:
        output = logits.view(operand_dtype)[:, :total_columns]
    if num_rows == 0 or total_columns == 0:
        return output
    launch(
        _row_gradient_kernel,
        (num_rows, num_parts),
        output=output,
        logits=logits,
        labels=labels,
        logsumexp=logsumexp,
        entropy=entropy,
        output_stride=output.stride(0),
        logits_stride=logits.stride(0),
        labels_stride=labels.stride(0),
        total_columns=total_columns,
        columns_per_part=ceil_div(num_blocks, num_parts) * block,
        IN_PLACE=num_parts == 1,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
        **gradients.launch_arguments(),
        **transform.launch_arguments(),
        **tile.launch_arguments(),
    )
    return output


@triton.jit(do_not_specialize=["first_column"])
def _row_gradient_kernel(
    output,  # [R, S]
    logits,  # [R, S]
    labels,  # [R]
    logsumexp,  # [R]
    entropy,  # [R]
    grad_logprobs,  # [R]
    grad_logsumexp,  # [R]
    grad_entropy,  # [R]
    bias,  # [S]
    temperature,  # [R] or a number
    output_stride,
    logits_stride,
    labels_stride,
    grad_logprobs_stride,
    grad_logsumexp_stride,
    grad_entropy_stride,
    total_columns,
    first_column,
    num_columns,
    columns_per_part,
    softcap,
    logit_scale,
    HAS_BIAS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_LOGSUMEXP: tl.constexpr,
    HAS_GRAD_ENTROPY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program goes through (a part of) a row in blocks: read, transform, write."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    softcap = as_fp32(softcap)
    logit_scale = as_fp32(logit_scale)
    inverse_temperature = inverse_temperature_of(row, True, temperature, ROW_TEMPERATURE)
    log_normaliser = tl.load(logsumexp + row)
    # A row of -inf alone has no distribution: its p is 0 everywhere, not NaN.
    log_normaliser = tl.where(log_normaliser == float("-inf"), 0.0, log_normaliser)
    label = (tl.load(labels + row * labels_stride) - first_column).to(tl.int32)
    g_logprob = tl.load(grad_logprobs + row * grad_logprobs_stride).to(tl.float32)
    factor = -g_logprob
    if HAS_GRAD_LOGSUMEXP:
        factor += tl.load(grad_logsumexp + row * grad_logsumexp_stride).to(tl.float32)
    if HAS_GRAD_ENTROPY:
        g_entropy = tl.load(grad_entropy + row * grad_entropy_stride).to(tl.float32)
        row_entropy = tl.load(entropy + row)
    logits += row * logits_stride
    output += row * output_stride
    begin = part * columns_per_part
    end = tl.minimum(begin + columns_per_part, total_columns)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        valid = columns < tl.minimum(end, num_columns)
        x = tl.load(logits + columns, mask=valid, other=0.0)
        if HAS_BIAS:
            x += tl.load(bias + columns, mask=valid, other=0.0).to(tl.float32)
        z, slope = logit_and_slope(x, inverse_temperature, softcap, logit_scale, HAS_SOFTCAP)
        log_p = z - log_normaliser
        p = tl.exp2(log_p * LOG2_E)
        if HAS_GRAD_ENTROPY:
            # log p of a vanished p may be -inf.
            weight = factor - g_entropy * tl.where(p > 0, log_p + row_entropy, 0.0)
            gradient = weight * p
        else:
            gradient = factor * p
        gradient += tl.where(columns == label, g_logprob, 0.0)
        gradient = tl.where(valid, gradient * slope, 0.0)
        if IN_PLACE:
            # Every thread has read this block before any thread writes over the row's beginning.
            tl.debug_barrier()
        tl.store(output + columns, gradient.to(output.dtype.element_ty), mask=columns < end)
