"""The `single_pass` strategy: loss and gradients chunk by chunk, logits computed once (6 T D V).

Exact when the loss of a chunk of rows needs nothing outside the chunk: token-level losses whose
normalisers are in the batch; document-level losses when chunks hold whole documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fastrl.functional.head.autograd import exactly, first_order
from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.deterministic import over_vocabulary
from fastrl.functional.head.logits_chunk import LogitsChunk
from fastrl.functional.head.main_grad import added
from fastrl.functional.head.recompute import forward_statistics
from fastrl.functional.head.running import (
    finish_statistics,
    new_running_statistics,
    scatter_rows,
)
from fastrl.functional.head.scaled_rows import scaled
from fastrl.functional.head.sharding import HiddenGradient, finish_weight_gradient, gather_hidden
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import RowGradients

# loss(statistics of the rows [start, stop) of `gradient_rows`, start, stop) -> scalar
ChunkLoss = Callable[[TokenStatistics, int, int], Tensor]


def single_pass(
    call: HeadCall,
    loss: ChunkLoss,
    *,
    gradient_rows: Tensor,  # [G] subset of call.rows
    chunk_ends: Sequence[int],
    with_statistics: bool = True,
) -> tuple[Tensor, TokenStatistics | None]:
    """Sum of `loss` over chunks of rows, and the detached statistics of `call.rows`.

    Args:
        call: from `check_inputs`.
        loss: called once a chunk with statistics that require grad; a sum over rows.
        gradient_rows: rows that the loss is a function of; the others of `call.rows` have neither
            loss nor gradient, and only run a forward.
        chunk_ends: cumulative number of gradient rows at the end of each chunk (`chunk_rows`).
        with_statistics: whether the statistics are part of the result.

    Returns:
        The scalar loss, whose backward multiplies the gradients formed here by the upstream
        gradient, and the statistics [T].
    """
    assert call.low_rank_weight is None, "a low-rank part takes slabs of the weight"
    chunk_spans = list(zip([0, *chunk_ends[:-1]], chunk_ends, strict=True)) if chunk_ends else []
    total, *statistics = _SinglePassLoss.apply(
        *call.tensors[:3], call, loss, gradient_rows, chunk_spans, with_statistics
    )
    return total, TokenStatistics(*statistics) if with_statistics else None


class _SinglePassLoss(torch.autograd.Function):
    """Forms all gradients in the forward; the backward scales them."""

    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: HeadCall,
        loss: ChunkLoss,
        gradient_rows: Tensor,
        chunk_spans: list[tuple[int, int]],
        with_statistics: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.main_grad = call.main_grad
        ctx.set_materialize_grads(False)  # those of the statistics
        call = call.with_operands()
        run = _SinglePass(call, gradient_rows, ctx.needs_input_grad[:3], len(chunk_spans))
        for start, stop in chunk_spans:
            run.chunk(start, stop, loss)
        ctx.gradients = run.gradients()
        if not with_statistics:
            return (run.loss(),)
        statistics = run.all_statistics()
        ctx.mark_non_differentiable(*statistics.vectors())
        return run.loss(), statistics.logprobs, statistics.entropy, statistics.logsumexp

    @staticmethod
    @first_order
    @exactly
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        keep_graph: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "the graph of the head was used up by its first backward; pass `retain_graph=True`"
                " there."
            )
        if not keep_graph:
            # Without another reference autograd takes the buffer without a copy.
            ctx.gradients = None
        results = scaled(gradients, grad_loss, in_place=not keep_graph)
        del gradients
        results[1] = added(results[1], ctx.main_grad)
        return (*results, None, None, None, None, None)


class _SinglePass:
    """The buffers of one forward."""

    def __init__(
        self,
        call: HeadCall,
        gradient_rows: Tensor,
        needs: Sequence[bool],
        num_chunks: int,
    ) -> None:
        weight, bias = call.weight, call.bias
        self.call, self.rows = call, gradient_rows
        self.hidden = gather_hidden(call.hidden_states, call.groups)
        self.losses: list[Tensor] = []
        self.parts: list[TokenStatistics] = []
        self.grad_hidden = HiddenGradient(call) if needs[0] else None
        self.grad_weight: Tensor | None = None
        if needs[1]:
            # The product of a single chunk accumulates in fp32; several are summed in fp32.
            dtype = call.gradient_dtypes[1] if num_chunks <= 1 else call.dtype
            self.grad_weight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            if num_chunks == 0:
                self.grad_weight.zero_()
        self.grad_bias: Tensor | None = None
        if needs[2] and bias is not None:
            self.grad_bias = torch.zeros_like(bias, dtype=call.dtype)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden states, weight and bias, in their dtypes."""
        call = self.call
        of_bias = None if call.bias is None else call.bias.dtype
        return (
            None if self.grad_hidden is None else self.grad_hidden.finish(),
            finish_weight_gradient(self.grad_weight, call.gradient_dtypes[1], call.groups),
            finish_weight_gradient(self.grad_bias, of_bias, call.groups),
        )

    def chunk(self, start: int, stop: int, loss: ChunkLoss) -> None:
        """Logits, statistics, loss and gradients of the rows [start, stop)."""
        call, rows = self.call, self.rows[start:stop]
        hidden = self.hidden[rows]
        logits = LogitsChunk(
            hidden,
            call.weight,
            call.labels[rows],
            call.transform.rows(rows),
            call.tile(),
            entropy=call.options.entropy,
            deterministic=call.options.deterministic,
        )
        running = over_vocabulary(call, logits.running, logits.parts)
        statistics = finish_statistics(running, call.options.entropy)
        self.parts.append(statistics)
        value, gradients = _loss_gradients(statistics, loss, start, stop)
        self.losses.append(value)
        grad_logits = logits.gradient(statistics, gradients)
        if self.grad_hidden is not None:
            self.grad_hidden.write(rows, grad_logits.times(call.weight), grad_logits.factors)
            if stop == self.rows.shape[0]:
                self.grad_hidden.end()
        if self.grad_weight is not None and start == 0:
            grad_logits.transposed_times(hidden, out=self.grad_weight)
        elif self.grad_weight is not None:
            grad_logits.add_transposed_times(hidden, self.grad_weight)
        if self.grad_bias is not None:
            self.grad_bias += grad_logits.column_sums()

    def loss(self) -> Tensor:
        """The sum over the chunks."""
        if not self.losses:
            return torch.zeros((), dtype=self.call.dtype, device=self.call.weight.device)
        return reduce(torch.add, self.losses).to(self.call.dtype)

    def all_statistics(self) -> TokenStatistics:
        """Statistics [T] of all the call's rows; those without gradient are computed here."""
        call, has_entropy = self.call, self.call.options.entropy
        parts = self.parts
        if not parts:
            empty = new_running_statistics(0, call.dtype, self.hidden.device)
            parts = [finish_statistics(empty, has_entropy)]
        # [K, T]: a launch for all vectors.
        found = [torch.stack(part.vectors()) for part in parts]
        of_rows = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        whole = scatter_rows(of_rows, self.rows, call.num_tokens)
        others = self._rows_without_gradient()
        if others is not None:
            statistics = forward_statistics(call, self.hidden[others], others)
            whole.index_copy_(1, others, torch.stack(statistics.vectors()))
        logprobs, *entropy, logsumexp = whole.unbind()
        return TokenStatistics(logprobs, entropy[0] if has_entropy else None, logsumexp)

    def _rows_without_gradient(self) -> Tensor | None:
        """The call's other rows; None where there are none."""
        num_others = self.call.rows.shape[0] - self.rows.shape[0]
        if num_others == 0:
            return None
        is_other = torch.zeros_like(self.call.labels, dtype=torch.bool)
        # Not by assignment, which copies the value from the host and synchronises.
        is_other.index_fill_(0, self.call.rows, True)
        is_other.index_fill_(0, self.rows, False)
        # The count is known on the host; `nonzero` would synchronise.
        return torch.nonzero_static(is_other, size=num_others)[:, 0]


def _loss_gradients(
    statistics: TokenStatistics, loss: ChunkLoss, start: int, stop: int
) -> tuple[Tensor, RowGradients]:
    """The chunk's loss and its gradient with respect to the statistics."""
    # In this thread: waking that of the device takes longer than these few operations.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        leaves = statistics.map(lambda value: value.detach().requires_grad_())
        value = loss(leaves, start, stop)
        grads = torch.autograd.grad(value, leaves.vectors(), allow_unused=True)
    logprobs = torch.zeros_like(leaves.logprobs) if grads[0] is None else grads[0]
    entropy = grads[1] if leaves.entropy is not None else None
    return value.detach(), RowGradients(logprobs, entropy, grads[-1])
