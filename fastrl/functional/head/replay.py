"""Statistics over recorded sets of entries, from the logits of those entries alone.

For R rows and N entries the products are N D, not R V D, and nothing of vocabulary size is formed
but the weight's gradient, which is 0 at entries that no row recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.functional.head import torch_rows
from fastrl.functional.head.autograd import exactly, first_order
from fastrl.functional.head.call import HeadCall, scatter_rows
from fastrl.functional.head.gathered import gathered_products, write_segments
from fastrl.functional.head.recorded_entries import RecordedEntries, recorded_entries
from fastrl.functional.head.running import finish_statistics, finite_or_zero
from fastrl.functional.head.sharding import (
    HiddenGradient,
    finish_weight_gradient,
    gather_hidden,
    merge_over_vocabulary,
    rows_with_gradient,
)
from fastrl.functional.head.tiling import spans
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import RowGradients, VocabularyTile

# Elements of the rows' gradient that exist at a time beside the result: 32 MiB in fp32.
GRADIENT_ELEMENTS = 2**23
# Each entry is a tile of one row and one column.
_ENTRY = VocabularyTile(0, 1, None)


def replay_logprobs(
    call: HeadCall,
    kept: KeptTokens,
    *,
    gradient_rows: Tensor | None = None,  # [G]
) -> TokenStatistics:
    """Statistics of the labels under softmax over the recorded entries K of each token.

        logprob = z[label] - log sum_{v in K} e^{z_v},   K with the label

    The set is a constant. A row's statistics depend on its hidden state, the weight and its set
    alone, and sums are made in a fixed order.

    Args:
        call: from `check_inputs`; all T tokens.
        kept: of the T tokens.
        gradient_rows: those that can have a gradient; default: all of the call.
    """
    return TokenStatistics(
        *_ReplayLogprobs.apply(*call.tensors, call.without_tensors(), kept, gradient_rows)
    )


def _products(call: HeadCall, hidden: Tensor, entries: RecordedEntries) -> Tensor:  # [N, 1]
    """h W^T + b of the entries."""
    products = torch.zeros(len(entries.rows), dtype=call.dtype, device=hidden.device)
    for part in call.parts:
        of_part = hidden[:, part.columns]
        products += gathered_products(of_part, part.weight, entries.rows, entries.columns)
    if call.bias is not None and len(call.bias):
        products += call.bias.detach()[entries.columns]
    return products[:, None]


def _running_statistics(call: HeadCall, hidden: Tensor, kept: KeptTokens) -> Tensor:  # [4, R]
    entries = recorded_entries(call, kept, call.rows)
    transform = call.transform.rows(call.rows).rows(entries.index)
    z, _ = torch_rows.transformed(_products(call, hidden, entries), transform, _ENTRY)
    z = torch.where(entries.is_there, z[:, 0], -torch.inf)
    maximum = entries.of_rows(z, "max")
    shifted = z - finite_or_zero(maximum)[entries.index]
    exp = shifted.exp()
    return torch.stack(
        [
            maximum,
            entries.of_rows(exp, "sum"),
            entries.of_rows(torch.where(exp > 0, shifted * exp, 0), "sum"),
            entries.of_rows(torch.where(entries.is_label, z, -torch.inf), "max"),
        ]
    )


class _ReplayLogprobs(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank_weight: Tensor | None,
        call: HeadCall,
        kept: KeptTokens,
        gradient_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.call, ctx.kept = call, kept
        call = call.on(hidden_states, weight, bias, low_rank_weight)
        hidden = gather_hidden(call.hidden_states, call.groups)[call.rows]
        running = merge_over_vocabulary(_running_statistics(call, hidden, kept), call.groups)
        statistics = finish_statistics(running, call.options.entropy)
        statistics = statistics.map(lambda value: scatter_rows(value, call.rows, call.num_tokens))
        ctx.gradient_rows = call.rows if gradient_rows is None else gradient_rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden_states, weight, bias, low_rank_weight, statistics.logsumexp, statistics.entropy
        )
        return statistics.logprobs, statistics.entropy, statistics.logsumexp

    @staticmethod
    @first_order
    @exactly
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, logsumexp, entropy = ctx.saved_tensors
        call: HeadCall = ctx.call.on(*tensors)
        rows = rows_with_gradient(call, ctx.gradient_rows, *grads)
        hidden = gather_hidden(call.hidden_states, call.groups)[rows]
        entries = recorded_entries(call, ctx.kept, rows)
        statistics = TokenStatistics(logsumexp, entropy, logsumexp)
        grad = _grad_products(call, hidden, rows, entries, statistics, grads)
        needs_hidden, needs_weight, needs_bias, needs_low_rank = ctx.needs_input_grad[:4]
        of_columns = _OfColumns(call, entries, grad)
        weights: list[Tensor | None] = [
            of_columns.sums(hidden[:, part.columns], part.weight, part.gradient_dtype)
            if needed
            else None
            for part, needed in zip(call.parts, (needs_weight, needs_low_rank), strict=False)
        ]
        grad_bias = None
        if needs_bias and call.bias is not None:
            ones = torch.ones(len(rows), 1, dtype=call.dtype, device=rows.device)
            grad_bias = of_columns.sums(ones, call.bias[:, None], call.bias.dtype)[:, 0]
        return (
            _hidden_gradient(call, rows, entries, grad) if needs_hidden else None,
            weights[0],
            grad_bias,
            weights[1] if len(weights) > 1 else None,
            *[None] * 3,
        )


def _grad_products(
    call: HeadCall,
    hidden: Tensor,  # [R, D]
    rows: Tensor,  # [R]
    entries: RecordedEntries,
    statistics: TokenStatistics,  # of [T], but for the log-probabilities
    grads: tuple[Tensor | None, ...],  # of logprobs, entropy, logsumexp
) -> Tensor:  # [N]
    """Gradient of the products of the entries; 0 for those that are not there."""
    tokens = rows[entries.index]
    logprobs, entropy, logsumexp = grads
    if logprobs is None:
        logprobs = torch.zeros_like(statistics.logsumexp)
    grad = torch_rows.row_gradient(
        _products(call, hidden, entries),
        torch.where(entries.is_label, 0, -1),
        statistics.logsumexp[tokens],
        None if statistics.entropy is None else statistics.entropy[tokens],
        RowGradients(logprobs, entropy, logsumexp).rows(tokens),
        call.transform.rows(tokens),
        _ENTRY,
        operand_dtype=call.dtype,
    )[:, 0]
    return torch.where(entries.is_there, grad, 0)


class _OfColumns:
    """The gradients of the products, sorted by weight row."""

    def __init__(self, call: HeadCall, entries: RecordedEntries, grad: Tensor) -> None:
        columns = torch.where(entries.is_there, entries.columns, call.weight.shape[0])
        self._columns, order = columns.sort(stable=True)
        self._grad, self._rows = grad[order], entries.index[order]
        self._groups = call.groups

    def sums(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """grad^T h, of the weight's shape: one sum a weight row, rounded once."""
        total = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        write_segments(total, self._columns, self._grad, hidden, self._rows)
        finished = finish_weight_gradient(total, dtype, self._groups)
        assert finished is not None
        return finished


def _hidden_gradient(
    call: HeadCall,
    rows: Tensor,  # [R]
    entries: RecordedEntries,
    grad: Tensor,  # [N]
) -> Tensor:
    """grad W at the rows."""
    total = HiddenGradient(call)
    depth = sum(part.weight.shape[1] for part in call.parts)
    for start, stop in spans(len(rows), max(GRADIENT_ELEMENTS // max(depth, 1), 1)):
        values = torch.zeros(stop - start, depth, dtype=call.dtype, device=rows.device)
        for part in call.parts:
            write_segments(
                values[:, part.columns], entries.rows, grad, part.weight, entries.columns, start
            )
        total.write(rows[start:stop], values)
    return total.finish()
