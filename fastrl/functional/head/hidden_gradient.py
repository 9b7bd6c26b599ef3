"""The gradient of the hidden states, put together from compact rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.matmul import compute_dtype
from fastrl.kernels import can_run
from fastrl.parallel import start_reduce_scatter


class HiddenGradient:
    """[T, D], zero but for the rows that are written; rounded to the hidden states' dtype once.

    Rows of partial sums over the vocabulary are all-reduced over `tp`, as compact and unrounded
    rows: fewer bytes than [T, D], and one rounding in all. Where the hidden states are sharded over
    `sp` as well, all [T, D] of them are reduced and scattered at the end. Both run beside what
    comes after `write`, the product for the weight's gradient.
    """

    def __init__(self, call: HeadCall, hidden_states: Tensor) -> None:
        self._groups = call.groups
        self._dtype = hidden_states.dtype
        self._gathers_hidden_states = call.groups.tp is not None and call.groups.sp is not None
        self._total = torch.zeros(
            call.num_tokens,
            hidden_states.shape[1],
            dtype=compute_dtype(self._dtype) if self._gathers_hidden_states else self._dtype,
            device=hidden_states.device,
        )
        self._sending: tuple[dist.Work, Tensor, Tensor] | None = None  # with its rows and values
        self._part: tuple[dist.Work, Tensor] | None = None  # with this rank's slice

    def write(
        self,
        rows: Tensor,  # [R]
        values: Tensor,  # [R, D] in compute_dtype
        factors: Tensor | None = None,  # [R] in compute_dtype
    ) -> None:
        """Sets the rows to factors[:, None] * values; destroys `values`."""
        if self._groups.tp is None or self._gathers_hidden_states:
            self._scatter(rows, values, factors)
            return
        self._receive()
        if factors is not None:
            values.mul_(factors[:, None])
        work = dist.all_reduce(values, group=self._groups.tp, async_op=True)
        assert work is not None
        self._sending = (work, rows, values)

    def end(self) -> None:
        """Says that all rows are written, so that they can be sent while other work goes on."""
        if self._gathers_hidden_states and self._part is None:
            assert self._groups.sp is not None
            self._part = start_reduce_scatter(self._total, self._groups.sp)

    def finish(self) -> Tensor:
        """The gradient of this rank's hidden states."""
        self.end()
        if self._part is not None:
            work, part = self._part
            work.wait()
            return part.to(self._dtype)
        self._receive()
        return self._total

    def _receive(self) -> None:
        """Puts the rows that were sent last in their place."""
        if self._sending is not None:
            work, rows, values = self._sending
            work.wait()
            self._scatter(rows, values, None)
            self._sending = None

    def _scatter(self, rows: Tensor, values: Tensor, factors: Tensor | None) -> None:
        if can_run(values):
            from fastrl.kernels.row_scaling import scatter_scaled_rows

            scatter_scaled_rows(self._total, values, factors, rows)
            return
        assert factors is None, "only kernels leave factors"
        self._total.index_copy_(0, rows, values.to(self._total.dtype))
