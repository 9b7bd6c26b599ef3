"""The `single_pass` strategy: loss and gradients chunk by chunk, logits computed once (6 T D V).

Right when the loss of a chunk of rows needs nothing outside of the chunk: token-level losses with
normalisers that the batch carries; document-level losses when chunks hold whole documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrl.functional.linear_logprobs import forward_statistics
from fastrl.functional.matmul import add_matmul_, compute_dtype, matmul
from fastrl.functional.problem import HeadProblem, scatter_rows
from fastrl.functional.row_ops import RowGradients, row_gradient, update_row_statistics
from fastrl.functional.statistics import (
    TokenStatistics,
    finish_statistics,
    new_running_statistics,
)

# loss(statistics of the rows [start, stop) of `gradient_rows`, start, stop) -> scalar
ChunkLoss = Callable[[TokenStatistics, int, int], Tensor]


def linear_loss(
    hidden_states: Tensor,  # [T, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    problem: HeadProblem,
    loss: ChunkLoss,
    *,
    gradient_rows: Tensor,  # [G] subset of problem.rows
    chunk_ends: Sequence[int],
) -> tuple[Tensor, TokenStatistics]:
    """Sum of `loss` over chunks of rows, and the detached statistics of `problem.rows`.

    Args:
        hidden_states: as in `linear_logprobs`, like `weight` and `bias`.
        weight: the head's weight.
        bias: the head's bias.
        problem: from `check_inputs`; the statistics of all its rows are returned.
        loss: called once a chunk with statistics that require gradient; only sums over rows.
        gradient_rows: rows that the loss sees. `problem.rows` outside of them are known to have
            neither loss nor gradient, and only get a forward.
        chunk_ends: cumulative number of gradient rows at the end of each chunk (`chunk_rows`).

    Returns:
        The scalar loss, whose backward multiplies the gradients that were formed here by the
        upstream gradient, and the statistics [T].
    """
    chunk_spans = list(zip([0, *chunk_ends[:-1]], chunk_ends, strict=True)) if chunk_ends else []
    total, logprobs, entropy, logsumexp = _LinearLoss.apply(
        hidden_states, weight, bias, problem, loss, gradient_rows, chunk_spans
    )
    return total, TokenStatistics(logprobs, entropy, logsumexp)


class _LinearLoss(torch.autograd.Function):
    """Forms all gradients in the forward; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: HeadProblem,
        loss: ChunkLoss,
        gradient_rows: Tensor,
        chunk_spans: list[tuple[int, int]],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        needs = ctx.needs_input_grad[:3]
        hidden = problem.gather_hidden(hidden_states)
        run = _SinglePass(hidden, weight, bias, problem, gradient_rows, needs, len(chunk_spans))
        for start, stop in chunk_spans:
            run.chunk(start, stop, loss)
        ctx.gradients = (
            problem.reduce_grad_hidden(run.grad_hidden, gradient_rows, hidden_states.dtype),
            problem.reduce_grad_weight(_to_dtype(run.grad_weight, weight.dtype)),
            problem.reduce_grad_weight(_to_dtype(run.grad_bias, weight.dtype)),
        )
        statistics = run.all_statistics()
        outputs = (statistics.logprobs, statistics.entropy, statistics.logsumexp)
        ctx.mark_non_differentiable(*(output for output in outputs if output is not None))
        return run.loss, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        keep_graph: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = ctx.gradients
        if keep_graph:
            scaled = [None if grad is None else grad * grad_loss for grad in gradients]
        else:
            # Without a reference from here autograd takes the buffer as it is, without a copy.
            ctx.gradients = None
            scaled = [None if grad is None else scale_(grad, grad_loss) for grad in gradients]
        return (*scaled, None, None, None, None)


class _SinglePass:
    """The buffers of one forward."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: HeadProblem,
        gradient_rows: Tensor,
        needs: Sequence[bool],
        num_chunks: int,
    ) -> None:
        self.hidden, self.weight, self.bias, self.problem = hidden, weight, bias, problem
        self.rows = gradient_rows
        self.dtype = compute_dtype(hidden.dtype)
        self.compact = hidden[gradient_rows]
        self.labels = problem.labels[gradient_rows]
        self.transform = problem.transform.rows(gradient_rows)
        self.num_chunks = num_chunks
        self.loss = torch.zeros((), dtype=self.dtype, device=hidden.device)
        self.parts: list[TokenStatistics] = []
        self.grad_hidden = torch.empty_like(self.compact, dtype=self.dtype) if needs[0] else None
        self.needs_weight = needs[1]
        self.grad_weight: Tensor | None = None
        if needs[1] and num_chunks != 1:
            self.grad_weight = torch.zeros_like(weight, dtype=self.dtype)
        self.grad_bias: Tensor | None = None
        if needs[2] and bias is not None:
            self.grad_bias = torch.zeros_like(bias, dtype=self.dtype)

    def chunk(self, start: int, stop: int, loss: ChunkLoss) -> None:
        """Logits, statistics, loss and gradients of the rows [start, stop)."""
        span = slice(start, stop)
        hidden, labels, transform = (
            self.compact[span],
            self.labels[span],
            self.transform.rows(span),
        )
        logits = matmul(hidden, self.weight.t())
        tile = self.problem.tile(self.bias, 0, self.weight.shape[0])
        running = new_running_statistics(stop - start, self.dtype, hidden.device)
        update_row_statistics(
            running, logits, labels, transform, tile, entropy=self.problem.entropy
        )
        running = self.problem.merge_over_vocabulary(running)
        statistics = finish_statistics(running, self.problem.entropy)
        self.parts.append(statistics)
        value, gradients = _loss_gradients(statistics, loss, start, stop)
        self.loss += value
        grad_logits = row_gradient(
            logits,
            labels,
            statistics.logsumexp,
            statistics.entropy,
            gradients,
            transform,
            tile,
        )
        if self.grad_hidden is not None:
            self.grad_hidden[span] = matmul(grad_logits, self.weight)
        if self.needs_weight and self.grad_weight is None:
            self.grad_weight = matmul(grad_logits.t(), hidden)
        elif self.grad_weight is not None:
            add_matmul_(self.grad_weight, grad_logits.t(), hidden)
        if self.grad_bias is not None:
            self.grad_bias += grad_logits.sum(0, dtype=self.dtype)

    def all_statistics(self) -> TokenStatistics:
        """Statistics [T] of all the problem's rows; those without gradient get a forward now."""
        problem = self.problem
        empty = new_running_statistics(0, self.dtype, self.hidden.device)
        parts = self.parts or [finish_statistics(empty, problem.entropy)]
        whole = TokenStatistics(
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.entropy for part in parts if part.entropy is not None])
            if problem.entropy
            else None,
            torch.cat([part.logsumexp for part in parts]),
        ).map(lambda value: scatter_rows(value, self.rows, problem.num_tokens))
        num_others = problem.rows.shape[0] - self.rows.shape[0]
        if num_others == 0:
            return whole
        is_other = torch.zeros_like(problem.labels, dtype=torch.bool)
        is_other[problem.rows] = True
        is_other[self.rows] = False
        # The count is known on the host: `nonzero` would wait for the device.
        others = torch.nonzero_static(is_other, size=num_others)[:, 0]
        statistics = forward_statistics(
            self.hidden[others],
            self.weight,
            self.bias,
            problem.labels[others],
            problem.transform.rows(others),
            problem,
        )
        for value, other in zip(whole.vectors(), statistics.vectors(), strict=True):
            value.index_copy_(0, others, other)
        return whole


def _loss_gradients(
    statistics: TokenStatistics, loss: ChunkLoss, start: int, stop: int
) -> tuple[Tensor, RowGradients]:
    """The chunk's loss and its gradient with respect to the statistics."""
    with torch.enable_grad():
        leaves = statistics.map(lambda value: value.detach().requires_grad_())
        value = loss(leaves, start, stop)
        grads = torch.autograd.grad(value, leaves.vectors(), allow_unused=True)
    logprobs = torch.zeros_like(leaves.logprobs) if grads[0] is None else grads[0]
    entropy = grads[1] if leaves.entropy is not None else None
    return value.detach(), RowGradients(logprobs, entropy, grads[-1])


def _to_dtype(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def scale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """tensor *= factor (a scalar tensor), in place, without waiting for the device."""
    return tensor.mul_(factor)
