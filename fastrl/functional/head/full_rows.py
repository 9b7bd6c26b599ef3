"""Any differentiable function of whole rows of logits, a chunk of rows at a time.

For what streaming statistics do not cover: divergences from a teacher, rarer statistics, the
sampler's keep-set. The function is written once, in PyTorch; the backward recomputes a chunk's
logits and differentiates the function by autograd (8 T D V in all).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.functional.head.autograd import exactly, first_order
from fastrl.functional.head.call import HeadCall, WeightPart
from fastrl.functional.head.main_grad import deliver_weight_gradient
from fastrl.functional.head.matmul import add_matmul_, matmul
from fastrl.functional.head.running import finite_or_zero, scatter_rows
from fastrl.functional.head.sharding import (
    HiddenGradient,
    finish_weight_gradient,
    gather_hidden,
    rows_with_gradient,
    to_columns,
    vocabulary_max,
    vocabulary_sum,
)
from fastrl.functional.head.tiling import even_chunk, single_pass_rows, spans
from fastrl.functional.head.torch_rows import label_columns, transformed
from fastrl.kernels.arguments import VocabularyTile
from fastrl.parallel import group_size


@dataclass(frozen=True)
class LogitRows:
    """Whole rows of logits z, of which this rank holds some columns.

    Reductions are over the whole vocabulary: under `tp` every rank repeats the same computation on
    replicated values [R], each with its own columns.
    """

    z: Tensor  # [R, S] of the columns that belong to the vocabulary
    tokens: Tensor  # [R] indices of the call's tokens
    labels: Tensor  # [R]
    tile: VocabularyTile  # of this rank's columns
    group: ProcessGroup | None

    def sum(self, values: Tensor) -> Tensor:  # [R, S] -> [R]
        """Sum over the vocabulary."""
        return vocabulary_sum(values.sum(1), self.group)

    def maximum(self, z: Tensor | None = None) -> Tensor:  # [R, S] -> [R]
        """The largest logit, without gradient."""
        z = self.z if z is None else z
        if z.shape[1] == 0:
            return vocabulary_max(z.new_full((z.shape[0],), -torch.inf), self.group)
        return vocabulary_max(z.amax(1), self.group)

    def logsumexp(self, z: Tensor | None = None) -> Tensor:  # [R, S] -> [R]
        """log sum exp; z may hold -inf."""
        z = self.z if z is None else z
        maximum = self.maximum(z)
        shift = finite_or_zero(maximum)
        return shift + self.sum((z - shift[:, None]).exp()).log()

    def to_columns(self, values: Tensor) -> Tensor:  # [R] -> [R, 1]
        """`values` as a column to combine with `z`; its gradient is summed over the ranks."""
        return to_columns(values, self.group)[:, None]

    def label_logits(self) -> Tensor:  # [R]
        """z of the labels, whichever rank holds their column."""
        if self.z.shape[1] == 0:
            return self.sum(self.z)
        column, inside = label_columns(self.labels, self.tile)
        picked = self.z.gather(1, column[:, None])[:, 0]
        return vocabulary_sum(torch.where(inside, picked, 0), self.group)

    def label_mask(self) -> Tensor:  # [R, S]
        """True at each label's column, if this rank holds it."""
        mask = torch.zeros_like(self.z, dtype=torch.bool)
        if self.z.shape[1] == 0:
            return mask
        column, inside = label_columns(self.labels, self.tile)
        return mask.scatter_(1, column[:, None], inside[:, None])


# function(rows) -> [K, R], differentiable in `rows.z`; it must not keep the logits alive.
RowFunction = Callable[[LogitRows], Tensor]

# Logit-sized tensors in memory for one chunk, its gradient and what autograd saves.
TENSORS_PER_CHUNK = 16


def full_rows(
    call: HeadCall,
    function: RowFunction,
    num_outputs: int,
    *,
    gradient_rows: Tensor | None = None,  # [G]
) -> Tensor:  # [K, T]
    """`function`, of K outputs, of the logits of `call.rows`; 0 and without gradient elsewhere.

    `gradient_rows` is the subset that can have a non-zero gradient; default: all.
    """
    outputs: Tensor = _FullRows.apply(
        *call.tensors, call.without_tensors(), function, num_outputs, gradient_rows
    )
    return outputs


class _FullRows(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank_weight: Tensor | None,
        call: HeadCall,
        function: RowFunction,
        num_outputs: int,
        gradient_rows: Tensor | None,
    ) -> Tensor:
        ctx.call, ctx.function = call, function
        call = call.on(hidden_states, weight, bias, low_rank_weight)
        hidden = gather_hidden(call.hidden_states, call.groups)
        num_rows = call.rows.shape[0]
        outputs = torch.empty(num_outputs, num_rows, dtype=call.dtype, device=weight.device)
        for chunk in _chunks(call, call.rows):
            rows = call.rows[chunk]
            products = _products(call.parts, hidden[rows])
            outputs[:, chunk] = function(_logit_rows(products, call, rows))
        ctx.gradient_rows = call.rows if gradient_rows is None else gradient_rows
        ctx.save_for_backward(hidden_states, weight, bias, low_rank_weight)
        return scatter_rows(outputs, call.rows, call.num_tokens)

    @staticmethod
    @first_order
    @exactly
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: HeadCall = ctx.call.on(*ctx.saved_tensors)
        bias = ctx.saved_tensors[2]
        hidden = gather_hidden(call.hidden_states, call.groups)
        dtype = call.dtype
        needs_hidden, needs_weight, needs_bias, needs_low_rank = ctx.needs_input_grad[:4]
        grad_hidden = HiddenGradient(call) if needs_hidden else None
        needs, parts = (needs_weight, needs_low_rank), call.parts
        grad_weights = [
            torch.zeros_like(part.weight, dtype=dtype) if needed else None
            for part, needed in zip(parts, needs, strict=False)
        ]
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        gradient_rows = rows_with_gradient(call, ctx.gradient_rows, *grads[0])
        for chunk in _chunks(call, gradient_rows):
            rows = gradient_rows[chunk]
            with torch.enable_grad():
                of_chunk = hidden[rows]
                products = _products(parts, of_chunk).detach().requires_grad_()
                outputs = ctx.function(_logit_rows(products, call, rows))
            (grad,) = torch.autograd.grad(outputs, products, grads[0][:, rows])
            if grad_hidden is not None:
                of_parts = [matmul(grad, part.weight.to(dtype)) for part in parts]
                grad_hidden.write(
                    rows, of_parts[0] if len(parts) == 1 else torch.cat(of_parts, dim=1)
                )
            for part, total in zip(parts, grad_weights, strict=True):
                if total is not None:
                    add_matmul_(total, grad.t(), of_chunk[:, part.columns].to(dtype))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del products, outputs, grad, of_chunk  # before those of the next chunk are allocated
        of_weight, *of_low_rank = grad_weights
        finished = [
            deliver_weight_gradient(of_weight, call),
            *(finish_weight_gradient(o, call.gradient_dtypes[2], call.groups) for o in of_low_rank),
        ]
        return (
            None if grad_hidden is None else grad_hidden.finish(),
            finished[0],
            None if bias is None else finish_weight_gradient(grad_bias, bias.dtype, call.groups),
            finished[1] if len(finished) > 1 else None,
            *[None] * 4,
        )


def _products(parts: Sequence[WeightPart], hidden: Tensor) -> Tensor:  # [R, D + r] -> [R, V]
    """h W^T, with that of a low-rank part."""
    products = [matmul(hidden[:, part.columns], part.weight.t()) for part in parts]
    return products[0] if len(products) == 1 else products[0].add_(products[1])


def _logit_rows(products: Tensor, call: HeadCall, rows: Tensor) -> LogitRows:
    tile = call.tile()
    z, _ = transformed(products, call.transform.rows(rows), tile)
    return LogitRows(z, rows, call.labels[rows], tile, call.groups.tp)


def _chunks(call: HeadCall, rows: Tensor) -> list[slice]:
    """Even chunks of rows, the same on every rank of `tp`."""
    columns = -(-call.vocab_size // group_size(call.groups.tp))
    itemsize = call.dtype.itemsize * TENSORS_PER_CHUNK
    most = single_pass_rows(columns, itemsize, *call.options.bounds)
    total = rows.shape[0]
    return [slice(start, stop) for start, stop in spans(total, even_chunk(total, most))]
