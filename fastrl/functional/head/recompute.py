"""The `recompute` strategy: statistics in the forward, logits recomputed in the backward (8 T D V).

The forward saves nothing of vocabulary size, and the loss may be any function of the statistics.
"""

from __future__ import annotations

from functools import reduce
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fastrl.functional.head.autograd import exactly, first_order
from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.deterministic import deterministic_statistics
from fastrl.functional.head.main_grad import deliver_weight_gradient
from fastrl.functional.head.matmul import add_matmul_
from fastrl.functional.head.running import (
    LABEL,
    MAX,
    finish_statistics,
    new_running_statistics,
    scatter_rows,
)
from fastrl.functional.head.scaled_rows import ScaledRows
from fastrl.functional.head.sharding import (
    HiddenGradient,
    finish_weight_gradient,
    gather_hidden,
    merge_over_vocabulary,
    rows_with_gradient,
)
from fastrl.functional.head.tile_ops import (
    TileGradients,
    gradient_itemsize,
    keeps_no_logits,
    tile_statistics,
)
from fastrl.functional.head.tiling import (
    RECOMPUTE_TILE_BYTES,
    Tiling,
    recompute_tiling,
    spans,
)
from fastrl.functional.head.weight_gradients import WeightGradients
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import RowGradients


def recompute_logprobs(
    call: HeadCall,
    gradient_rows: Tensor | None = None,  # [G]
) -> TokenStatistics:
    """`linear_logprobs` of a call from `check_inputs`."""
    logprobs, entropy, logsumexp, is_argmax = _RecomputeLogprobs.apply(
        *call.tensors, call, gradient_rows
    )
    return TokenStatistics(logprobs, entropy, logsumexp, is_argmax=is_argmax)


def forward_statistics(
    call: HeadCall,
    hidden: Tensor,  # [R, D] of the rows
    rows: Tensor,  # [R]
) -> TokenStatistics:  # of [R]
    """Statistics of some rows, tile by tile; one collective for all rows under `tp`."""
    return finish_statistics(_running_statistics(call, hidden, rows), call.options.entropy)


def _running_statistics(
    call: HeadCall,
    hidden: Tensor,  # [R, D] of the rows
    rows: Tensor,  # [R]
) -> Tensor:  # [4, R] over the whole vocabulary
    if call.options.deterministic:
        return deterministic_statistics(call, hidden, rows)
    labels, transform = call.labels[rows], call.transform.rows(rows)
    num_rows, num_columns = rows.shape[0], call.weight.shape[0]
    statistics = new_running_statistics(num_rows, call.dtype, hidden.device)
    tiling = _forward_tiling(call, hidden)
    for start, stop in spans(num_rows, tiling.num_rows):
        for first, last in spans(num_columns, tiling.num_columns):
            tile_statistics(
                statistics[:, start:stop],
                hidden[start:stop],
                call.slab(first, last),
                labels[start:stop],
                transform.rows(slice(start, stop)),
                call.tile(first, last),
                entropy=call.options.entropy,
            )
    return merge_over_vocabulary(statistics, call.groups)


def _forward_tiling(call: HeadCall, hidden: Tensor) -> Tiling:
    """One tile where no logits are kept, slabs of bounded size where they are joined copies."""
    num_rows, num_columns = hidden.shape[0], call.weight.shape[0]
    if not keeps_no_logits(hidden, call.slab(0, min(num_columns, 1))):
        itemsize = call.dtype.itemsize
        return recompute_tiling(num_rows, num_columns, itemsize, *call.options.bounds)
    columns = num_columns
    if call.low_rank_weight is not None:
        columns = RECOMPUTE_TILE_BYTES // hidden[0].nbytes
    return Tiling(max(num_rows, 1), max(min(columns, num_columns), 1))


class _RecomputeLogprobs(torch.autograd.Function):
    """Statistics of all labelled rows; the backward recomputes the logits."""

    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank_weight: Tensor | None,
        call: HeadCall,
        gradient_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        ctx.call = call.without_tensors()
        call = call.with_operands()
        # What is gathered goes when its rows are taken.
        hidden = gather_hidden(call.hidden_states, call.groups)[call.rows]
        running = _running_statistics(call, hidden, call.rows)
        is_argmax = None
        if call.options.is_argmax:
            # The running maximum is the largest logit itself where no exponentials are kept.
            is_argmax = scatter_rows(running[LABEL] >= running[MAX], call.rows, call.num_tokens)
            ctx.mark_non_differentiable(is_argmax)
        statistics = finish_statistics(running, call.options.entropy, call.rows, call.num_tokens)
        ctx.gradient_rows = call.rows if gradient_rows is None else gradient_rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden_states, weight, bias, low_rank_weight, statistics.logsumexp, statistics.entropy
        )
        return statistics.logprobs, statistics.entropy, statistics.logsumexp, is_argmax

    @staticmethod
    @first_order
    @exactly
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, logsumexp, entropy = ctx.saved_tensors
        call: HeadCall = ctx.call.on(*tensors)
        grad_logprobs, grad_entropy, grad_logsumexp, _ = grads
        rows = rows_with_gradient(call, ctx.gradient_rows, *grads[:3])
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logsumexp)
        lse = logsumexp[rows]
        grad_rows, grad_weight, grad_bias, grad_low_rank = recompute_backward(
            call,
            rows,
            # Log-probabilities are not needed again.
            TokenStatistics(lse, None if entropy is None else entropy[rows], lse),
            RowGradients(grad_logprobs, grad_entropy, grad_logsumexp).rows(rows),
            ctx.needs_input_grad[:4],
        )
        grad_hidden: Tensor | None = None
        if grad_rows is not None:
            total = HiddenGradient(call)
            total.write(rows, grad_rows)
            grad_hidden = total.finish()
        return (
            grad_hidden,
            deliver_weight_gradient(grad_weight, call),
            finish_weight_gradient(grad_bias, None, call.groups),
            finish_weight_gradient(grad_low_rank, None, call.groups),
            None,
            None,
        )


def recompute_backward(
    call: HeadCall,
    rows: Tensor,  # [R]
    statistics: TokenStatistics,  # of [R]
    gradients: RowGradients,  # of [R]
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the rows' hidden states (accumulation dtype), weight, bias and low-rank weight.

    None for a weight whose gradient is in `main_grad` already.

    Vocabulary slab by vocabulary slab: a slab's weight gradient is summed over row chunks in fp32
    (inside one matrix product when there is one chunk) and rounded once, to the dtype of its
    tensor; that of the hidden states is summed over slabs.
    """
    bias, dtype = call.bias, call.dtype
    hidden = gather_hidden(call.hidden_states, call.groups)[rows]
    labels, transform = call.labels[rows], call.transform.rows(rows)
    num_rows, num_columns = rows.shape[0], call.weight.shape[0]
    any_slab = call.slab(0, min(num_columns, 1))
    itemsize = gradient_itemsize(hidden, any_slab)
    tiling = recompute_tiling(num_rows, num_columns, itemsize, *call.options.bounds)
    grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs[0] else None
    grad_bias = torch.zeros_like(bias) if needs[2] and bias is not None else None
    parts = [slice(*span) for span in spans(num_rows, tiling.num_rows)]
    hidden_parts = [hidden[part] for part in parts]
    gradients_of = WeightGradients(call, hidden_parts, (needs[1], needs[3]))
    tile_gradients = [
        TileGradients(
            chunk,
            any_slab,
            labels[part],
            statistics.map(itemgetter(part)),
            gradients.rows(part),
            transform.rows(part),
        )
        for chunk, part in zip(hidden_parts, parts, strict=True)
    ]
    for first, last in spans(num_columns, tiling.num_columns):
        slab, tile = call.slab(first, last), call.tile(first, last)
        gradients_of.begin(first, last)
        bias_sums: list[Tensor] = []
        for number, part in enumerate(parts):
            grad_logits = tile_gradients[number].of(slab, tile)
            if grad_hidden is not None:
                add_matmul_(grad_hidden[part], grad_logits, slab)
            gradients_of.add(grad_logits, number)
            if grad_bias is not None:
                bias_sums.append(ScaledRows(grad_logits, None).column_sums())
            del grad_logits  # before the next tile is allocated
        gradients_of.end()
        if grad_bias is not None and bias_sums:
            grad_bias[first:last] = reduce(torch.add, bias_sums)
    grad_weight, grad_low_rank = gradients_of.results
    return grad_hidden, grad_weight, grad_bias, grad_low_rank
