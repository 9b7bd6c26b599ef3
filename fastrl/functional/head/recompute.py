"""The `recompute` strategy: statistics in the forward, logits a second time in the backward.

The forward keeps nothing of vocabulary size and works for every loss of the statistics (8 T D V).
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fastrl.functional.head.autograd import exactly, first_order
from fastrl.functional.head.call import HeadCall, scatter_rows
from fastrl.functional.head.hidden_gradient import HiddenGradient
from fastrl.functional.head.matmul import add_matmul_, compute_dtype, matmul_rounded
from fastrl.functional.head.running import finish_statistics, new_running_statistics
from fastrl.functional.head.tile_ops import (
    ScaledRows,
    gradient_itemsize,
    keeps_no_logits,
    tile_gradient,
    tile_statistics,
)
from fastrl.functional.head.tiling import Tiling, recompute_tiling, spans
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import LogitTransform, RowGradients


def streaming_logprobs(
    hidden_states: Tensor,  # [T, D], [T / sp, D] under sequence and vocabulary parallelism
    weight: Tensor,  # [V, D], [V_local, D] under vocabulary parallelism
    bias: Tensor | None,  # [V] or [V_local]
    call: HeadCall,
    gradient_rows: Tensor | None,  # [G]
) -> TokenStatistics:
    """`linear_logprobs` of a call from `check_inputs`."""
    logprobs, entropy, logsumexp = _LinearLogprobs.apply(
        hidden_states, weight, bias, call, gradient_rows
    )
    return TokenStatistics(logprobs, entropy if call.entropy else None, logsumexp)


def forward_statistics(
    hidden: Tensor,  # [R, D] compact rows
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,  # [R]
    transform: LogitTransform,
    call: HeadCall,
) -> TokenStatistics:  # of [R]
    """Statistics of compact rows, tile by tile; one collective for all rows under `tp`."""
    num_rows, dtype = hidden.shape[0], compute_dtype(hidden.dtype)
    statistics = new_running_statistics(num_rows, dtype, hidden.device)
    tiling = Tiling(max(num_rows, 1), max(weight.shape[0], 1))
    if not keeps_no_logits(hidden, weight):
        bounds = (call.chunk_size, call.max_logits_bytes)
        tiling = recompute_tiling(num_rows, weight.shape[0], dtype.itemsize, *bounds)
    for start, stop in spans(num_rows, tiling.num_rows):
        for first, last in spans(weight.shape[0], tiling.num_columns):
            tile_statistics(
                statistics[:, start:stop],
                hidden[start:stop],
                weight[first:last],
                labels[start:stop],
                transform.rows(slice(start, stop)),
                call.tile(bias, first, last),
                entropy=call.entropy,
            )
    return finish_statistics(call.merge_over_vocabulary(statistics), call.entropy)


class _LinearLogprobs(torch.autograd.Function):
    """Statistics of all labelled rows; the backward computes logits again (8 T D V in all)."""

    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: HeadCall,
        gradient_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        statistics = forward_statistics(
            call.gather_hidden(hidden_states)[call.rows],
            weight,
            bias,
            call.labels[call.rows],
            call.transform.rows(call.rows),
            call,
        )
        statistics = statistics.map(lambda value: scatter_rows(value, call.rows, call.num_tokens))
        ctx.call = call
        ctx.gradient_rows = call.rows if gradient_rows is None else gradient_rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_states, weight, bias, statistics.logsumexp, statistics.entropy)
        return statistics.logprobs, statistics.entropy, statistics.logsumexp

    @staticmethod
    @first_order
    @exactly
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, logsumexp, entropy = ctx.saved_tensors
        call: HeadCall = ctx.call
        rows = call.rows_with_gradient(ctx.gradient_rows, *grads)
        grad_logprobs, grad_entropy, grad_logsumexp = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logsumexp)
        lse = logsumexp[rows]
        grad_compact, grad_weight, grad_bias = recompute_backward(
            call.gather_hidden(hidden_states)[rows],
            weight,
            bias,
            call.labels[rows],
            # Log-probabilities are not needed again.
            TokenStatistics(lse, None if entropy is None else entropy[rows], lse),
            RowGradients(grad_logprobs, grad_entropy, grad_logsumexp).rows(rows),
            call.transform.rows(rows),
            call,
            (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]),
        )
        grad_hidden: Tensor | None = None
        if grad_compact is not None:
            total = HiddenGradient(call, hidden_states)
            total.write(rows, grad_compact)
            grad_hidden = total.finish()
        return (
            grad_hidden,
            call.finish_weight_gradient(grad_weight, weight.dtype),
            call.finish_weight_gradient(grad_bias, weight.dtype),
            None,
            None,
        )


def recompute_backward(
    hidden: Tensor,  # [R, D] compact rows
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,  # [R]
    statistics: TokenStatistics,  # of [R]
    gradients: RowGradients,  # of [R]
    transform: LogitTransform,
    call: HeadCall,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden (compute dtype, compact), weight and bias (their dtypes).

    Vocabulary slab by vocabulary slab: a slab's weight gradient is summed over row chunks in fp32
    (inside one matrix product when there is one chunk) and rounded once; that of hidden is summed
    over slabs.
    """
    num_rows, dtype = hidden.shape[0], compute_dtype(hidden.dtype)
    itemsize = gradient_itemsize(hidden, weight)
    bounds = (call.chunk_size, call.max_logits_bytes)
    tiling = recompute_tiling(num_rows, weight.shape[0], itemsize, *bounds)
    grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs[0] else None
    grad_weight: Tensor | None = None
    if needs[1]:
        grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    grad_bias = torch.empty_like(bias) if needs[2] and bias is not None else None
    row_spans = spans(num_rows, tiling.num_rows)
    for first, last in spans(weight.shape[0], tiling.num_columns):
        slab = weight[first:last]
        slab_grad: Tensor | None = None
        if needs[1] and len(row_spans) != 1:
            slab_grad = torch.zeros_like(slab, dtype=dtype)
        slab_bias_grad = torch.zeros(last - first, dtype=dtype, device=weight.device)
        for start, stop in row_spans:
            chunk = slice(start, stop)
            grad_logits = tile_gradient(
                hidden[chunk],
                slab,
                labels[chunk],
                statistics.map(itemgetter(chunk)),
                gradients.rows(chunk),
                transform.rows(chunk),
                call.tile(bias, first, last),
            )
            if grad_hidden is not None:
                add_matmul_(grad_hidden[chunk], grad_logits, slab)
            if slab_grad is not None:
                add_matmul_(slab_grad, grad_logits.t(), hidden[chunk])
            elif grad_weight is not None:
                out = grad_weight[first:last]
                matmul_rounded(grad_logits.t(), hidden, out=out)
            if grad_bias is not None:
                slab_bias_grad += ScaledRows(grad_logits, None).column_sums()
            del grad_logits  # before the next tile is allocated
        if grad_weight is not None and slab_grad is not None:
            grad_weight[first:last] = slab_grad
        if grad_bias is not None:
            grad_bias[first:last] = slab_bias_grad
    return grad_hidden, grad_weight, grad_bias
