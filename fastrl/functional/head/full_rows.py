"""Any function of whole rows of logits, differentiable, a chunk of rows at a time.

For what the streaming statistics do not hold: divergences from a teacher, rarer statistics, the
sampler's keep-set. The function is written once, in PyTorch; the backward computes a chunk's logits
again and lets autograd take the function's gradient (8 T D V in all).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.functional.head.autograd import exactly, first_order
from fastrl.functional.head.call import HeadCall, scatter_rows
from fastrl.functional.head.hidden_gradient import HiddenGradient
from fastrl.functional.head.matmul import add_matmul_, compute_dtype, matmul
from fastrl.functional.head.tiling import even_chunk, spans
from fastrl.functional.head.torch_rows import label_columns, transformed
from fastrl.kernels.arguments import VocabularyTile
from fastrl.parallel import group_size

# function(z [R, S], rows [R]) -> [K, R]: z are this rank's columns of the vocabulary, `rows` the
# tokens they belong to. Under `tp` it must reduce over the vocabulary (`vocabulary_sum`).
RowFunction = Callable[[Tensor, Tensor], Tensor]

# Logit-sized tensors that may exist at a time for one chunk, its gradient and autograd's memory.
_TENSORS_PER_CHUNK = 8


def full_rows(
    hidden_states: Tensor,  # [T, D], [T / sp, D] under sequence and vocabulary parallelism
    weight: Tensor,  # [V, D], [V_local, D] under vocabulary parallelism
    bias: Tensor | None,  # [V] or [V_local]
    call: HeadCall,
    function: RowFunction,
    num_outputs: int,
    *,
    gradient_rows: Tensor | None = None,  # [G]
) -> Tensor:  # [K, T]
    """`function` of the logits of the rows of `call`; 0 and without gradient elsewhere.

    Args:
        hidden_states: as in `linear_logprobs`, like `weight` and `bias`.
        weight: the head's weight.
        bias: the head's bias.
        call: from `check_inputs`: layout, transform, bounds and rows.
        function: differentiable in z; nothing of the logits may outlive it.
        num_outputs: K.
        gradient_rows: the subset of rows that can have a non-zero gradient, if known.
    """
    outputs: Tensor = _FullRows.apply(
        hidden_states, weight, bias, call, function, num_outputs, gradient_rows
    )
    return outputs


def vocabulary_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the vocabulary's ranks of values that all of them go on with alike.

    The gradient of a rank's part is the gradient of the sum: the ranks repeat one computation, so
    their gradients are equal and are not added.
    """
    if group is None:
        return values
    result: Tensor = _VocabularySum.apply(values, group)
    return result


def to_columns(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """`values` that all ranks have alike, to be combined with this rank's columns.

    Each rank then has a part of their gradient, so it is summed over the ranks.
    """
    if group is None:
        return values
    result: Tensor = _ToColumns.apply(values, group)
    return result


def vocabulary_max(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Maximum over the vocabulary's ranks, without gradient."""
    values = values.detach().clone()
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def label_logits(
    z: Tensor,  # [R, S]
    labels: Tensor,  # [R]
    tile: VocabularyTile,
    group: ProcessGroup | None,
) -> Tensor:  # [R]
    """z of the labels, whichever rank has their column."""
    if z.shape[1] == 0:
        return vocabulary_sum(z.sum(1), group)
    column, inside = label_columns(labels, tile)
    picked = z.gather(1, column[:, None])[:, 0]
    return vocabulary_sum(torch.where(inside, picked, 0), group)


def row_logsumexp(z: Tensor, group: ProcessGroup | None) -> Tensor:  # [R, S] -> [R]
    """log sum exp over the whole vocabulary; z may hold -inf."""
    maximum = row_maximum(z, group)
    shift = torch.where(maximum == -torch.inf, 0, maximum)
    return shift + vocabulary_sum((z - shift[:, None]).exp().sum(1), group).log()


def row_maximum(z: Tensor, group: ProcessGroup | None) -> Tensor:  # [R, S] -> [R]
    """The largest logit of the whole vocabulary, without gradient."""
    if z.shape[1] == 0:
        return vocabulary_max(z.new_full((z.shape[0],), -torch.inf), group)
    return vocabulary_max(z.amax(1), group)


class _VocabularySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ToColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _FullRows(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: HeadCall,
        function: RowFunction,
        num_outputs: int,
        gradient_rows: Tensor | None,
    ) -> Tensor:
        hidden = call.gather_hidden(hidden_states)
        dtype = compute_dtype(weight.dtype)
        outputs = torch.empty(num_outputs, call.rows.shape[0], dtype=dtype, device=weight.device)
        for chunk in _chunks(call, call.rows, weight):
            rows = call.rows[chunk]
            products = matmul(hidden[rows], weight.t())
            outputs[:, chunk] = function(_logits(products, bias, call, rows), rows)
        ctx.call, ctx.function = call, function
        ctx.gradient_rows = call.rows if gradient_rows is None else gradient_rows
        ctx.save_for_backward(hidden_states, weight, bias)
        return scatter_rows(outputs.t(), call.rows, call.num_tokens).t()

    @staticmethod
    @first_order
    @exactly
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias = ctx.saved_tensors
        call: HeadCall = ctx.call
        hidden = call.gather_hidden(hidden_states)
        dtype = compute_dtype(weight.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = HiddenGradient(call, hidden_states) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        gradient_rows = call.rows_with_gradient(ctx.gradient_rows, *grads[0])
        for chunk in _chunks(call, gradient_rows, weight):
            rows = gradient_rows[chunk]
            with torch.enable_grad():
                products = matmul(hidden[rows], weight.t()).detach().requires_grad_()
                outputs = ctx.function(_logits(products, bias, call, rows), rows)
            (grad,) = torch.autograd.grad(outputs, products, grads[0][:, rows])
            if grad_hidden is not None:
                grad_hidden.write(rows, matmul(grad, weight.to(dtype)))
            if grad_weight is not None:
                add_matmul_(grad_weight, grad.t(), hidden[rows].to(dtype))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            None if grad_hidden is None else grad_hidden.finish(),
            call.finish_weight_gradient(grad_weight, weight.dtype),
            call.finish_weight_gradient(grad_bias, weight.dtype),
            *[None] * 4,
        )


def _logits(products: Tensor, bias: Tensor | None, call: HeadCall, rows: Tensor) -> Tensor:
    """z of the columns that belong to the vocabulary."""
    if bias is not None:
        bias = bias.detach()
    tile = call.tile(bias, 0, products.shape[1])
    return transformed(products, call.transform.rows(rows), tile)[0]


def _chunks(call: HeadCall, rows: Tensor, weight: Tensor) -> list[slice]:
    """Even chunks of rows; of as many rows on every rank that shares the vocabulary."""
    columns = -(-call.vocab_size // group_size(call.groups.tp))
    itemsize = compute_dtype(weight.dtype).itemsize * _TENSORS_PER_CHUNK
    most = max(call.max_logits_bytes // (itemsize * columns), 1)
    if call.chunk_size is not None:
        most = min(most, call.chunk_size)
    total = rows.shape[0]
    return [slice(start, stop) for start, stop in spans(total, even_chunk(total, most))]
