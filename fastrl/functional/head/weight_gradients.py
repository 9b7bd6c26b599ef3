"""Gradients of the weight of `recompute`'s backward, a slab of the vocabulary at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.matmul import add_matmul_, matmul_rounded


class WeightGradients:
    """Gradients of the weight and of the low-rank part, a slab of rows of both at a time.

    Attributes:
        results: of the weight and of the low-rank part; None where not needed.
    """

    def __init__(self, call: HeadCall, hidden: Tensor, needs: tuple[bool, bool]) -> None:
        self._dtype = call.dtype
        self.results: list[Tensor | None] = [None, None]
        # (hidden states, gradient) of each part that needs one
        self._parts: list[tuple[Tensor, Tensor]] = []
        for number, part in enumerate(call.parts):
            if needs[number]:
                grad = torch.empty(
                    part.weight.shape, dtype=part.gradient_dtype, device=part.weight.device
                )
                self.results[number] = grad
                self._parts.append((hidden[:, part.columns], grad))
        self._slab = slice(0, 0)
        self._sums: list[Tensor] | None = None

    def begin(self, first: int, last: int, num_chunks: int) -> None:
        """Starts the rows [first, last) of the weights."""
        self._slab = slice(first, last)
        self._sums = None
        if num_chunks != 1:
            self._sums = [
                torch.zeros_like(grad[self._slab], dtype=self._dtype) for _, grad in self._parts
            ]

    def add(self, grad_logits: Tensor, chunk: slice) -> None:
        """Adds the products of a chunk of rows."""
        for number, (hidden, grad) in enumerate(self._parts):
            if self._sums is None:
                matmul_rounded(grad_logits.t(), hidden[chunk], out=grad[self._slab])
            else:
                add_matmul_(self._sums[number], grad_logits.t(), hidden[chunk])

    def end(self) -> None:
        """Rounds the sums of the slab."""
        for (_, grad), total in zip(self._parts, self._sums or (), strict=False):
            grad[self._slab] = total
