"""Statistics over recorded sets of entries, from the logits of those entries alone.

For R rows and N entries the products are N D, not R V D, and nothing of vocabulary size is formed
but the weight's gradient, which is 0 at entries that no row recorded. Rows without a record are
taken over the whole vocabulary, by `recompute`, in the same call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.functional.head.autograd import exactly, first_order
from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.entry_ops import entry_ops
from fastrl.functional.head.recompute import forward_statistics
from fastrl.functional.head.recorded_entries import RecordedEntries, recorded_entries
from fastrl.functional.head.replay_gradients import ReplayGradients
from fastrl.functional.head.sharding import (
    gather_hidden,
    merge_over_vocabulary,
    rows_with_gradient,
)
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import RowGradients


@dataclass(frozen=True)
class ReplayRows:
    """The rows of a call, and those of them that can have a gradient.

    Attributes:
        recorded: [R] with a recorded set.
        recorded_gradient: [G] of `recorded`.
        whole: [R'] without one, over the whole vocabulary.
        whole_gradient: [G'] of `whole`.
    """

    recorded: Tensor
    recorded_gradient: Tensor
    whole: Tensor
    whole_gradient: Tensor

    @classmethod
    def all_recorded(cls, rows: Tensor, gradient_rows: Tensor | None = None) -> ReplayRows:
        """Rows that all have a set; default: all can have a gradient."""
        return cls(rows, rows if gradient_rows is None else gradient_rows, rows[:0], rows[:0])


def replay_logprobs(call: HeadCall, kept: KeptTokens, rows: ReplayRows) -> TokenStatistics:
    """Statistics of the labels under softmax over the recorded entries K of each token.

        logprob = z[label] - log sum_{v in K} e^{z_v},   K with the label

    The set is a constant. A row's statistics depend on its hidden state, the weight and its set
    alone, and sums are made in a fixed order. A set of the label alone has a log-probability, an
    entropy and their gradients of exactly 0, and no work in the backward.

    Args:
        call: from `check_inputs`; all T tokens.
        kept: of the T tokens.
        rows: of the call.
    """
    return TokenStatistics(
        *_ReplayLogprobs.apply(*call.tensors, call.without_tensors(), kept, rows)
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
        rows: ReplayRows,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.call, ctx.rows = call, rows
        call = call.on(hidden_states, weight, bias, low_rank_weight)
        hidden = gather_hidden(call.hidden_states, call.groups)
        ops, tile = entry_ops(hidden), call.tile()
        is_row = torch.zeros_like(call.labels, dtype=torch.bool).index_fill_(0, rows.recorded, True)
        entries = recorded_entries(call, tile.num_columns, kept, is_row)
        products = _products(call, hidden, entries)
        running = ops.entry_statistics(
            products, entries.columns, entries.offsets, call.labels, call.transform, tile
        )
        running = merge_over_vocabulary(running, call.groups)
        logprobs, entropy, logsumexp = ops.finish_rows(running, is_row)
        statistics = TokenStatistics(logprobs, entropy if call.options.entropy else None, logsumexp)
        if len(rows.whole):
            of_whole = forward_statistics(call, hidden[rows.whole], rows.whole)
            for value, found in zip(statistics.vectors(), of_whole.vectors(), strict=True):
                value.index_copy_(0, rows.whole, found)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden_states, weight, bias, low_rank_weight, logsumexp, statistics.entropy,
            products, entries.slots, entries.columns, entries.offsets,
        )  # fmt: skip
        return statistics.logprobs, statistics.entropy, statistics.logsumexp

    @staticmethod
    @first_order
    @exactly
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, logsumexp, entropy, products, slots, columns, offsets = ctx.saved_tensors
        call: HeadCall = ctx.call.on(*tensors)
        logprobs, *others = grads
        if logprobs is None:
            logprobs = torch.zeros_like(logsumexp)
        run = ReplayGradients(
            call,
            RecordedEntries(slots, columns, offsets),
            TokenStatistics(logsumexp, entropy, logsumexp),  # log-probabilities are not needed
            RowGradients(logprobs, *others),
            ctx.needs_input_grad[:4],
        )
        run.add_whole_rows(rows_with_gradient(call, ctx.rows.whole_gradient, *grads))
        run.add_recorded(products, ctx.rows.recorded_gradient)
        return (*run.finish(), *[None] * 3)


def _products(call: HeadCall, hidden: Tensor, entries: RecordedEntries) -> Tensor:  # [N]
    """h W^T of the entries."""
    first, *others = (
        entry_ops(hidden).gathered_products(
            hidden[:, part.columns], part.weight, entries.slots, entries.columns
        )
        for part in call.parts
    )
    for other in others:
        first += other
    return first
