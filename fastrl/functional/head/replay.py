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
from fastrl.functional.head.recompute import forward_statistics, recompute_backward
from fastrl.functional.head.recorded_entries import RecordedEntries, recorded_entries
from fastrl.functional.head.sharding import (
    HiddenGradient,
    added_to_main_grad,
    deliver_weight_gradient,
    finish_weight_gradient,
    gather_hidden,
    merge_over_vocabulary,
    rows_with_gradient,
)
from fastrl.functional.head.tiling import spans
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import RowGradients

# Elements of the rows' gradient that exist at a time before it is summed over ranks: 32 MiB.
GRADIENT_ELEMENTS = 2**23


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
        run = _Backward(
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


class _Backward:
    """The gradients of a call: first those of rows over the whole vocabulary, then of entries."""

    def __init__(
        self,
        call: HeadCall,
        entries: RecordedEntries,
        statistics: TokenStatistics,  # of [T]
        gradients: RowGradients,  # of [T]
        needs: tuple[bool, bool, bool, bool],
    ) -> None:
        self.call, self.entries = call, entries
        self.statistics, self.gradients, self.needs = statistics, gradients, needs
        self.hidden = gather_hidden(call.hidden_states, call.groups)
        self.grad_hidden = HiddenGradient(call) if needs[0] else None
        buffer = added_to_main_grad(call) if needs[1] else None
        self.is_added = buffer is not None  # the weight's gradient, to `main_grad`
        # Of the weight, the bias and the low-rank part.
        self.sums: list[Tensor | None] = [buffer, None, None]

    def add_whole_rows(
        self,
        rows: Tensor,  # [G]
    ) -> None:
        """The gradients of rows without a record; zeros without such rows and `main_grad`."""
        call, needs = self.call, self.needs
        if len(rows):
            grad_rows, weight, *self.sums[1:] = recompute_backward(
                call,
                rows,
                self.statistics.map(lambda value: value[rows]),
                self.gradients.rows(rows),
                needs,
            )
            self.sums[0] = self.sums[0] if self.is_added else weight
            if self.grad_hidden is not None and grad_rows is not None:
                self.grad_hidden.write(rows, grad_rows)
            return
        weights = zip((0, 2), (needs[1], needs[3]), call.parts, strict=False)
        for place, is_needed, part in weights:
            if is_needed and self.sums[place] is None:
                self.sums[place] = torch.zeros_like(
                    part.weight, dtype=part.gradient_dtype, memory_format=torch.contiguous_format
                )
        if needs[2] and call.bias is not None:
            self.sums[1] = torch.zeros_like(call.bias)

    def add_recorded(
        self,
        products: Tensor,  # [N]
        rows: Tensor,  # [G]
    ) -> None:
        """The gradients of the entries."""
        call, entries, ops = self.call, self.entries, entry_ops(self.hidden)
        grad = ops.entry_gradient(
            products, entries.slots, entries.columns, call.labels, self.statistics.logsumexp,
            self.statistics.entropy, self.gradients, call.transform, call.tile(),
        )  # fmt: skip
        if any(self.needs[1:]):
            columns, order = entries.columns.sort(stable=True)
            for place, part in zip((0, 2), call.parts, strict=False):
                total, of_part = self.sums[place], self.hidden[:, part.columns]
                if total is not None:
                    ops.add_segments(total, columns, order, grad, of_part, entries.slots)
            if self.sums[1] is not None:
                ones = torch.ones_like(self.hidden[:, :1])
                ops.add_segments(self.sums[1][:, None], columns, order, grad, ones, entries.slots)
        if self.grad_hidden is not None:
            self._write_hidden(self.grad_hidden, grad, rows)

    def _write_hidden(
        self,
        total: HiddenGradient,
        grad: Tensor,  # [N]
        rows: Tensor,  # [G]
    ) -> None:
        call, entries, ops = self.call, self.entries, entry_ops(self.hidden)

        def write(output: Tensor, rows: Tensor, at_slots: bool) -> None:
            for part in call.parts:
                ops.write_rows(
                    output[:, part.columns], rows, entries.offsets, grad, part.weight,
                    entries.columns, at_slots=at_slots,
                )  # fmt: skip

        if total.rounded is not None:
            write(total.rounded, rows, True)
            return
        depth = self.hidden.shape[1]
        for start, stop in spans(len(rows), max(GRADIENT_ELEMENTS // max(depth, 1), 1)):
            values = torch.empty(stop - start, depth, dtype=call.dtype, device=rows.device)
            write(values, rows[start:stop], False)
            total.write(rows[start:stop], values)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight, bias and low-rank weight."""
        weight, *others = self.sums
        return (
            None if self.grad_hidden is None else self.grad_hidden.finish(),
            None if self.is_added else deliver_weight_gradient(weight, self.call),
            *(
                grad if grad is None else finish_weight_gradient(grad, grad.dtype, self.call.groups)
                for grad in others
            ),
        )
