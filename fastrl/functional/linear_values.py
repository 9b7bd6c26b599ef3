"""A scalar of each token: the product of its hidden state with one vector."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.functional.head.autograd import exactly, first_order
from fastrl.functional.head.matmul import accumulation_dtype, matmul
from fastrl.parallel import ParallelGroups, gather_first_dim, gathers_hidden_states, group_rank


def linear_values(
    hidden_states: Tensor,  # [T, D], [T / sp, D] under sequence parallelism
    weight: Tensor,  # [1, D]
    rows: Tensor,  # [R]
    groups: ParallelGroups | None = None,
) -> Tensor:  # [T], [T / sp] where the head's ranks hold different tokens
    """h . w of the given rows, 0 at others, in fp32 (float64 of float64 hidden states).

        d loss / d h_t = g_t w,    d loss / d w = sum_t g_t h_t

    The sums are in fp32. The weight is whole on every rank. Where the ranks of `sp` hold slices
    of the tokens and the language-model head sees all of them (`tp` and `sp`), the values are
    gathered, [T] numbers; the weight's gradient is summed over `sp`, as that of the head.

    Args:
        hidden_states: bf16, fp16, fp32 or float64.
        weight: in any of these dtypes.
        rows: int64, of this rank's hidden states.
        groups: those of the language-model head.
    """
    groups = groups or ParallelGroups()
    values: Tensor = _LinearValues.apply(hidden_states, weight, rows, groups)
    return values


class _LinearValues(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any, hidden_states: Tensor, weight: Tensor, rows: Tensor, groups: ParallelGroups
    ) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(hidden_states, weight, rows)
        products = matmul(hidden_states[rows], _like(weight, hidden_states).t())[:, 0]
        values = products.new_zeros(hidden_states.shape[0]).index_copy_(0, rows, products)
        if gathers_hidden_states(groups):
            assert groups.sp is not None
            values = gather_first_dim(values, groups.sp)
        return values

    @staticmethod
    @first_order
    @exactly
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, rows = ctx.saved_tensors
        sp = ctx.groups.sp
        (grad,) = grads
        if gathers_hidden_states(ctx.groups):
            # Every rank of `sp` computes the same loss of all tokens: its gradients do not add up.
            grad = grad[group_rank(sp) * hidden_states.shape[0] :]
        grad = grad[rows][:, None]
        grad_hidden: Tensor | None = None
        grad_weight: Tensor | None = None
        if ctx.needs_input_grad[0]:
            of_rows = (grad * weight.to(grad.dtype)).to(hidden_states.dtype)
            grad_hidden = torch.zeros_like(hidden_states).index_copy_(0, rows, of_rows)
        if ctx.needs_input_grad[1]:
            grad_weight = grad.t() @ hidden_states[rows].to(grad.dtype)
            if sp is not None:
                dist.all_reduce(grad_weight, group=sp)
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def _like(weight: Tensor, hidden_states: Tensor) -> Tensor:
    """The weight as an operand beside the hidden states: in their dtype, or in fp32 beside them."""
    if weight.dtype == hidden_states.dtype:
        return weight
    return weight.to(accumulation_dtype(hidden_states.dtype))
