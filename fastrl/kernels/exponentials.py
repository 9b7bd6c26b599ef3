"""From exponentials of logits to gradients: one factor per row, and the label's element.

`linear_exponentials` leaves q = e^(z - reference), so that p = q e^(reference - lse). The gradient
of a row's products,

    dx = slope (p (a - b log p) + g_logprob onehot),
    a = g_logsumexp - g_logprob - g_entropy entropy,  b = g_entropy,

is c q' with c = slope n e^(reference - lse), and q' = q (a - b log p) / n but for the label's
element, q' = (p (a - b log p) + g_logprob) / n e^(lse - reference). With b = 0 and n = a only the
label's element changes. So dx itself is never formed:

    dh = c (q' W),   dW = q'^T (c h),

which saves reading and writing all of q once more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels import linear
from fastrl.kernels.arguments import LogitTransform, RowGradients, VocabularyTile
from fastrl.kernels.launch import launch
from fastrl.kernels.linear_kernel import nearest_reference
from fastrl.kernels.transform import LN_2, LOG2_E, as_fp32

# |n| is at least this times |g_logprob|: below, the part of p is lost in rounding anyway, and
# g_logprob / n would overflow.
SMALLEST_RATIO = tl.constexpr(2.0**-20)
# Above log2 of any vocabulary's size, the most by which the log-sum-exp exceeds the largest logit.
MOST_BITS = tl.constexpr(20.0)


def finish_exponentials(
    exponentials: Tensor,  # [R, S] bf16
    partials: Tensor,  # [tiles, 3, R]
    label_logits: Tensor,  # [R]
    labels: Tensor,  # [R]
    logsumexp: Tensor,  # [R]
    entropy: Tensor | None,  # [R]
    gradients: RowGradients,
    transform: LogitTransform,
    tile: VocabularyTile,
) -> Tensor:  # [R] fp32
    """Turns q into q', in place; with the result c, the gradient of the products is c q'.

    c absorbs the rounding of the label's element, mostly the largest of its row: that element is
    exact, and the others have a common relative error of at most 2^-9. With a gradient of the
    entropy the elements of p are rounded twice, and q is read and written once: 4 S bytes a row.

    Args:
        exponentials: `linear_exponentials`' output.
        partials: its result.
        label_logits: z[label], the last row of the statistics.
        labels: int64, of the whole vocabulary.
        logsumexp: of z over the whole vocabulary, fp32.
        entropy: fp32, needed with a gradient of it.
        gradients: upstream, fp32; that of the entropy is not supported with a softcap.
        transform: how products became z.
        tile: of the exponentials.
    """
    assert gradients.entropy is None or (entropy is not None and transform.softcap is None)
    num_rows = exponentials.shape[0]
    factors = logsumexp.new_empty(num_rows)
    if num_rows == 0:
        return factors
    launch(
        _finish_kernel,
        (num_rows,),
        exponentials=exponentials,
        partials=partials,
        label_logits=label_logits,
        labels=labels,
        logsumexp=logsumexp,
        entropy=entropy if gradients.entropy is not None else None,
        factors=factors,
        exponentials_stride=exponentials.stride(0),
        labels_stride=labels.stride(0),
        num_rows=num_rows,
        num_tiles=partials.shape[0],
        total_columns=exponentials.shape[1],
        first_column=tile.first_column,
        num_columns=tile.num_columns,
        TILE=linear.BLOCKS.columns,
        BLOCK_TILES=512,
        BLOCK=2048,
        num_warps=4,
        **gradients.launch_arguments(),
        **transform.launch_arguments(),
    )
    return factors


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "first_column"])
def _finish_kernel(
    exponentials,  # [R, S]
    partials,  # [tiles, 3, R]
    label_logits,  # [R]
    labels,  # [R]
    logsumexp,  # [R]
    entropy,  # [R]
    grad_logprobs,  # [R]
    grad_logsumexp,  # [R]
    grad_entropy,  # [R]
    temperature,  # [R] or a number
    factors,  # [R]
    exponentials_stride,
    labels_stride,
    grad_logprobs_stride,
    grad_logsumexp_stride,
    grad_entropy_stride,
    num_rows,
    num_tiles,
    total_columns,
    first_column,
    num_columns,
    softcap,
    logit_scale,
    ROW_TEMPERATURE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_LOGSUMEXP: tl.constexpr,
    HAS_GRAD_ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program finds its row's reference, rescales the row if needed, and sets the label."""
    row = tl.program_id(0).to(tl.int64)
    exponentials += row * exponentials_stride
    partials += row
    part_stride = 3 * tl.cast(num_rows, tl.int64)
    softcap = as_fp32(softcap)
    logit_scale = as_fp32(logit_scale)
    largest = tl.full((), float("-inf"), tl.float32)
    smallest = tl.full((), float("inf"), tl.float32)
    for start in range(0, num_tiles, BLOCK_TILES):
        tiles = start + tl.arange(0, BLOCK_TILES)
        mask = tiles < num_tiles
        references = tl.load(partials + tiles * part_stride, mask=mask, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(references, 0))
        smallest = tl.minimum(smallest, tl.min(tl.where(mask, references, float("inf")), 0))
    log_normaliser = tl.load(logsumexp + row)
    # A row of -inf alone has q = 0 and no distribution.
    log_normaliser = tl.where(log_normaliser == float("-inf"), 0.0, log_normaliser)
    # The row's largest logits may be on another rank: e^(lse - reference) must not overflow.
    largest = tl.maximum(largest, nearest_reference(log_normaliser * LOG2_E - MOST_BITS) * LN_2)
    g_logprob = tl.load(grad_logprobs + row * grad_logprobs_stride).to(tl.float32)
    constant = -g_logprob
    if HAS_GRAD_LOGSUMEXP:
        constant += tl.load(grad_logsumexp + row * grad_logsumexp_stride).to(tl.float32)
    norm = constant
    g_entropy = tl.full((), 0.0, tl.float32)
    if HAS_GRAD_ENTROPY:
        g_entropy = tl.load(grad_entropy + row * grad_entropy_stride).to(tl.float32)
        constant -= g_entropy * tl.load(entropy + row)
        norm = tl.abs(constant) + tl.abs(g_entropy)
    least = tl.abs(g_logprob) * SMALLEST_RATIO
    norm = tl.where(tl.abs(norm) < least, least, norm)
    inverse = tl.where(norm == 0.0, 0.0, 1.0 / tl.where(norm == 0.0, 1.0, norm))
    if HAS_GRAD_ENTROPY or smallest < largest:
        for start in range(0, total_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < total_columns
            tiles = (columns // TILE).to(tl.int64)
            reference = tl.load(partials + tiles * part_stride, mask=mask, other=0.0)
            values = tl.load(exponentials + columns, mask=mask, other=0.0).to(tl.float32)
            # Steps of 128: by halves, since values may be large where 2^-128 underflows.
            root = tl.exp2(tl.floor((reference - largest) * (0.5 * LOG2_E) + 0.5))
            scaled = values * root * root
            if HAS_GRAD_ENTROPY:
                log_p = tl.log2(values) * LN_2 + (reference - log_normaliser)
                scaled *= (constant - g_entropy * tl.where(values > 0, log_p, 0.0)) * inverse
            tl.store(exponentials + columns, scaled.to(exponentials.dtype.element_ty), mask=mask)
        # The label's element, below, comes last.
        tl.debug_barrier()
    if ROW_TEMPERATURE:
        slope = logit_scale / tl.load(temperature + row).to(tl.float32)
    else:
        slope = logit_scale / as_fp32(temperature)
    unit = tl.exp2((log_normaliser - largest) * LOG2_E)
    factor = norm / unit
    label = tl.load(labels + row * labels_stride) - first_column
    if (label >= 0) & (label < num_columns):
        z = tl.load(label_logits + row)
        log_p = z - log_normaliser
        p = tl.exp2(log_p * LOG2_E)
        if HAS_GRAD_ENTROPY:
            p *= (constant - g_entropy * tl.where(p > 0, log_p, 0.0)) * inverse
        element = (p + g_logprob * inverse) * unit
        if HAS_SOFTCAP:
            bounded = z * logit_scale / (slope * softcap)
            element *= 1.0 - bounded * bounded
        rounded = element.to(exponentials.dtype.element_ty)
        tl.store(exponentials + label, rounded)
        rounded = rounded.to(tl.float32)
        factor = tl.where(rounded == 0.0, factor, factor * (element / rounded))
    tl.store(factors + row, factor * slope)
