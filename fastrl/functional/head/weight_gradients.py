"""Gradients of the weight of `recompute`'s backward, a slab of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.main_grad import added_to_main_grad
from fastrl.functional.head.matmul import add_matmul_, matmul_rounded


@dataclass
class _Part:
    """A weight's gradient, and the sum of the slab that is being formed.

    Attributes:
        hidden: [R, K] hidden states of each chunk of rows that it multiplies.
        grad: [V, K] result, or buffer that it is added to.
        is_added: whether `grad` is such a buffer.
        total: [S, K] of the slab, in the dtype of sums; None where one product gives it rounded.
    """

    hidden: list[Tensor]
    grad: Tensor
    is_added: bool
    total: Tensor | None = None


class WeightGradients:
    """Gradients of the weight and of the low-rank part, a slab of rows of both at a time.

    Into a `main_grad` in the dtype of sums the products add their result themselves: nothing of the
    weight's size exists beside it.

    Attributes:
        results: of the weight and of the low-rank part; None where not needed, or added already.
    """

    def __init__(
        self,
        call: HeadCall,
        hidden: Sequence[Tensor],  # [R, D + r] of each chunk of rows
        needs: tuple[bool, bool],
    ) -> None:
        self._dtype = call.dtype
        self._is_summed = len(hidden) != 1
        self.results: list[Tensor | None] = [None, None]
        self._parts: list[_Part] = []  # that need one
        for number, part in enumerate(call.parts):
            if not needs[number]:
                continue
            buffer = added_to_main_grad(call) if number == 0 else None
            grad = buffer
            if grad is None:
                grad = self.results[number] = torch.empty(
                    part.weight.shape, dtype=part.gradient_dtype, device=part.weight.device
                )
            chunks = [chunk[:, part.columns] for chunk in hidden]
            self._parts.append(_Part(chunks, grad, buffer is not None))
        self._slab = slice(0, 0)

    def begin(self, first: int, last: int) -> None:
        """Starts the rows [first, last) of the weights."""
        self._slab = slice(first, last)
        for part in self._parts:
            slab = part.grad[self._slab]
            if part.is_added and slab.dtype == self._dtype:
                part.total = slab
            elif part.is_added or self._is_summed:
                part.total = torch.zeros_like(slab, dtype=self._dtype)

    def add(self, grad_logits: Tensor, chunk: int) -> None:
        """Adds the products of a chunk of rows."""
        for part in self._parts:
            if part.total is None:
                out = part.grad[self._slab]
                matmul_rounded(grad_logits.t(), part.hidden[chunk], out=out)
            else:
                add_matmul_(part.total, grad_logits.t(), part.hidden[chunk])

    def end(self) -> None:
        """Rounds the sums of the slab."""
        for part in self._parts:
            slab = part.grad[self._slab]
            if part.total is None:
                continue
            if not part.is_added:
                slab.copy_(part.total)
            elif slab.dtype != self._dtype:
                slab += part.total
            part.total = None
