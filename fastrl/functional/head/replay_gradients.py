"""The gradients of `replay`: of recorded entries, and of rows over the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.entry_ops import entry_ops
from fastrl.functional.head.main_grad import added_to_main_grad, deliver_weight_gradient
from fastrl.functional.head.recompute import recompute_backward
from fastrl.functional.head.recorded_entries import RecordedEntries
from fastrl.functional.head.sharding import (
    HiddenGradient,
    finish_weight_gradient,
    gather_hidden,
)
from fastrl.functional.head.tiling import spans
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import RowGradients

# Elements of the rows' gradient that exist at a time before it is summed over ranks: 32 MiB.
GRADIENT_ELEMENTS = 2**23


class ReplayGradients:
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
        self.zeros: set[int] = set()  # places of those that are 0 so far

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
                self.zeros.add(place)
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
            pairs = (*entries.columns.sort(stable=True), grad)
            for place, part in zip((0, 2), call.parts, strict=False):
                total, of_part = self.sums[place], self.hidden[:, part.columns]
                if total is not None:
                    is_zero = place in self.zeros
                    ops.add_segments(total, *pairs, of_part, entries.slots, onto_zeros=is_zero)
            if self.sums[1] is not None:
                total, ones = self.sums[1][:, None], torch.ones_like(self.hidden[:, :1])
                ops.add_segments(total, *pairs, ones, entries.slots, onto_zeros=False)
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
            *(finish_weight_gradient(grad, None, self.call.groups) for grad in others),
        )
