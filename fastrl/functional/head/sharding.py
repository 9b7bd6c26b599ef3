"""Every collective of the head.

Under `tp` each rank holds rows of the weight: statistics of its columns are merged, gradients of
the hidden states summed. With both `tp` and `sp` the hidden states are sharded by tokens: gathered,
and their gradient reduce-scattered. With `sp` alone the weight is replicated, its gradient summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.matmul import accumulation_dtype
from fastrl.functional.head.running import merge_running_statistics
from fastrl.functional.head.scaled_rows import scatter_scaled
from fastrl.parallel import (
    ParallelGroups,
    gather_first_dim,
    gathers_hidden_states,
    group_size,
    head_splits_tokens,
    start_reduce_scatter,
)

# Elements of a weight's gradient widened at a time: 64 MiB in fp32.
_REDUCED_ELEMENTS = 2**24


def gather_hidden(
    hidden_states: Tensor,  # [T, D] or [T / sp, D]
    groups: ParallelGroups,
) -> Tensor:  # [T, D]
    """All tokens' hidden states: one all-gather over `sp` where they are sharded."""
    if not gathers_hidden_states(groups):
        return hidden_states
    assert groups.sp is not None
    return gather_first_dim(hidden_states, groups.sp)


def merge_over_vocabulary(
    statistics: Tensor,  # [4, R]
    groups: ParallelGroups,
) -> Tensor:  # [4, R]
    """Running statistics of the whole vocabulary: one all-gather over `tp`."""
    if groups.tp is None:
        return statistics
    parts = gather_first_dim(statistics, groups.tp)
    return merge_running_statistics(parts.view(group_size(groups.tp), *statistics.shape))


def merge_roots_over_vocabulary(
    roots: Tensor,  # [num_roots, 3, R]
    label_logits: Tensor,  # [R], -inf where another rank has the label
    call: HeadCall,
) -> Tensor:  # [4, R]
    """Running statistics of the whole vocabulary by `call.tree`: one all-gather over `tp`."""
    group, num_rows = call.groups.tp, len(label_logits)
    if group is not None:
        sent = torch.cat([roots.flatten(0, 1), label_logits[None]])
        parts = gather_first_dim(sent, group).view(group_size(group), -1, num_rows)
        roots = parts[:, :-1].reshape(-1, 3, num_rows).contiguous()
        label_logits = parts[:, -1].amax(0)
    whole = call.tree.whole(roots, call.options.entropy)
    return torch.cat([whole, label_logits[None]])


def rows_with_gradient(
    call: HeadCall,
    rows: Tensor,  # [R]
    *grads: Tensor | None,  # [T] each
) -> Tensor:
    """Those of `rows` with a non-zero upstream gradient; all of them without `drop_inactive_rows`.

    Synchronises. One all-reduce over `tp`: ranks whose gradients differ in the last bit must not
    differ in their rows.
    """
    if not call.options.drop_inactive_rows:
        return rows
    is_active = torch.zeros(rows.shape, dtype=torch.int32, device=rows.device)
    for grad in grads:
        if grad is not None:
            is_active |= grad[rows] != 0
    if call.groups.tp is not None:
        dist.all_reduce(is_active, op=dist.ReduceOp.MAX, group=call.groups.tp)
    return rows[is_active.bool()]


def finish_weight_gradient(
    grad: Tensor | None, dtype: torch.dtype | None, groups: ParallelGroups
) -> Tensor | None:
    """The gradient of weight or bias in `dtype`, or as it is where that is None; destroys `grad`.

    That of a weight replicated over `sp` is all-reduced in `accumulation_dtype`, a part at a time:
    a sum in 16 bits would round once a rank.
    """
    if grad is None:
        return None
    if head_splits_tokens(groups):
        for part in grad.split(max(_REDUCED_ELEMENTS // grad[0].numel(), 1)):
            wide = part.to(accumulation_dtype(part.dtype))
            dist.all_reduce(wide, group=groups.sp)
            part.copy_(wide)
    return grad if dtype is None else grad.to(dtype)


class HiddenGradient:
    """[T, D], zero outside the written rows; rounded to the hidden states' dtype once.

    Rows of partial sums over the vocabulary are all-reduced over `tp` compact and unrounded: fewer
    bytes than [T, D], and one rounding in all. Where the hidden states are sharded over `sp` as
    well, the whole [T, D] is reduce-scattered at the end. Both overlap with what follows `write`,
    the product for the weight's gradient.
    """

    def __init__(self, call: HeadCall) -> None:
        self._groups, self._dtype = call.groups, call.gradient_dtypes[0]
        self._gathers_hidden_states = gathers_hidden_states(call.groups)
        self._total = torch.zeros(
            call.num_tokens,
            call.hidden_states.shape[1],
            dtype=call.dtype if self._gathers_hidden_states else self._dtype,
            device=call.hidden_states.device,
        )
        self._sending: tuple[dist.Work, Tensor, Tensor] | None = None  # with its rows and values
        self._part: tuple[dist.Work, Tensor] | None = None  # with this rank's slice

    @property
    def rounded(self) -> Tensor | None:
        """[T, D] to write rounded rows into; None where `write` first sums them over ranks."""
        return self._total if self._groups.tp is None else None

    def write(
        self,
        rows: Tensor,  # [R]
        values: Tensor,  # [R, D] in accumulation_dtype
        factors: Tensor | None = None,  # [R] in accumulation_dtype
    ) -> None:
        """Sets the rows to factors[:, None] * values; destroys `values`."""
        if self._groups.tp is None or self._gathers_hidden_states:
            scatter_scaled(self._total, rows, values, factors)
            return
        self._receive()
        if factors is not None:
            values.mul_(factors[:, None])
        work = dist.all_reduce(values, group=self._groups.tp, async_op=True)
        assert work is not None
        self._sending = (work, rows, values)

    def end(self) -> None:
        """Starts the reduce-scatter once all rows are written, to overlap with other work."""
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
        """Waits for the last all-reduce and writes its rows."""
        if self._sending is not None:
            work, rows, values = self._sending
            work.wait()
            scatter_scaled(self._total, rows, values, None)
            self._sending = None


def vocabulary_sum(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the vocabulary's ranks, for a computation that every rank repeats.

    The gradient of a rank's part is the gradient of the sum: equal on all ranks, and not added.
    """
    if group is None:
        return values
    result: Tensor = _VocabularySum.apply(values, group)
    return result


def to_columns(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replicated `values` to combine with this rank's columns.

    Each rank then holds a part of their gradient, which is summed over the ranks.
    """
    if group is None:
        return values
    result: Tensor = _ToColumns.apply(values, group)
    return result


def vocabulary_max(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Maximum over the vocabulary's ranks, without gradient."""
    values = values.detach().clone()
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


class _VocabularySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ToColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
