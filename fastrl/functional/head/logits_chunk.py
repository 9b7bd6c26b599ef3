"""Logits of some rows of `single_pass`, which become their gradient in the same memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.matmul import accumulation_dtype, matmul
from fastrl.functional.head.parts import tile_parts
from fastrl.functional.head.running import LABEL, new_running_statistics
from fastrl.functional.head.scaled_rows import ScaledRows
from fastrl.functional.head.tile_ops import (
    keeps_exponentials,
    new_operand,
    row_gradient,
    update_row_statistics,
)
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import LogitTransform, RowGradients, VocabularyTile


class LogitsChunk:
    """A chunk of rows of the whole (local) vocabulary, from its statistics to its gradient.

    Attributes:
        running: [4, R] running statistics of the chunk; if `deterministic`, the labels' logits.
        parts: those of `tile_parts` if `deterministic`.
    """

    def __init__(
        self,
        hidden: Tensor,  # [R, D]
        weight: Tensor,  # [V, D]
        labels: Tensor,  # [R]
        transform: LogitTransform,
        tile: VocabularyTile,
        *,
        entropy: bool,
        deterministic: bool = False,
    ) -> None:
        self._hidden, self._weight, self._labels = hidden, weight, labels
        self._transform, self._tile = transform, tile
        dtype, device, num_rows = accumulation_dtype(hidden.dtype), hidden.device, len(hidden)
        self._references: Tensor | None = None
        self.parts: Tensor | None = None
        if keeps_exponentials(hidden, weight):
            from fastrl.kernels.linear import linear_exponentials

            self.running = torch.full((4, num_rows), -torch.inf, dtype=dtype, device=device)
            self._logits = new_operand(hidden, weight.shape[0], torch.bfloat16)
            self.parts = self._references = linear_exponentials(
                self.running,
                self._logits,
                hidden,
                weight,
                labels,
                transform,
                tile,
                entropy=entropy,
            )
            return
        self.running = new_running_statistics(num_rows, dtype, device)
        self._logits = matmul(hidden, weight.t())
        if deterministic:
            operands = (hidden, weight, labels, transform, tile)
            self.parts = tile_parts(self.running[LABEL], *operands, entropy=entropy)
        else:
            update_row_statistics(
                self.running, self._logits, labels, transform, tile, entropy=entropy
            )

    def gradient(self, statistics: TokenStatistics, gradients: RowGradients) -> ScaledRows:
        """Gradient of the products, in the memory of the logits; can be called once.

        `statistics` cover the whole vocabulary; `gradients` are those of the loss by them.
        """
        where = (self._transform, self._tile)
        if self._references is None:
            matrix = row_gradient(
                self._logits, self._labels, statistics, gradients, *where, self._hidden.dtype
            )
            return ScaledRows(matrix, None)
        if gradients.entropy is not None and self._transform.softcap is not None:
            # log p cannot be recovered from what is stored: recompute the logits.
            from fastrl.kernels.linear import linear_gradient

            operands = (self._hidden, self._weight, self._labels)
            of_rows = (statistics.logsumexp, statistics.entropy)
            linear_gradient(self._logits, *operands, *of_rows, gradients, *where)
            return ScaledRows(self._logits, None)
        from fastrl.kernels.exponentials import finish_exponentials

        factors = finish_exponentials(
            self._logits,
            self._references,
            self.running[LABEL],
            self._labels,
            statistics.logsumexp,
            statistics.entropy,
            gradients,
            *where,
        )
        return ScaledRows(self._logits, factors)
