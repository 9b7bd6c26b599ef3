"""Products with the head's weight, of the size [rows, vocabulary], and what is made of them.

Callers need not know which path runs: where kernels with epilogues run (`kernels.can_run_fused`) no
logits reach memory; elsewhere a matrix product in fp32 is followed by a row operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.functional.head.matmul import add_matmul_, compute_dtype, matmul, matmul_rounded
from fastrl.functional.head.running import LABEL, new_running_statistics
from fastrl.functional.head.torch_rows import row_gradient, update_row_statistics
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels import can_run, can_run_fused, has_fused_layout
from fastrl.kernels.arguments import LogitTransform, RowGradients, VocabularyTile


def keeps_no_logits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether statistics of these operands need no logits in memory, and so no tiles."""
    return can_run_fused(hidden, weight)


def gradient_itemsize(hidden: Tensor, weight: Tensor) -> int:
    """Bytes an element of the tiles of `recompute`'s backward."""
    if can_run_fused(hidden, weight):
        return hidden.dtype.itemsize
    return compute_dtype(hidden.dtype).itemsize


def chunk_itemsize(hidden: Tensor, weight: Tensor) -> int:
    """Bytes an element of a chunk of `single_pass`; the same on all ranks of a `tp` group."""
    return 2 if _has_exponentials(hidden, weight) else compute_dtype(hidden.dtype).itemsize


def tile_statistics(
    statistics: Tensor,  # [4, R]
    hidden: Tensor,  # [R, D]
    weight: Tensor,  # [S, D] rows of a tile of the vocabulary
    labels: Tensor,  # [R]
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> None:
    """Merges the logits of a tile into running statistics, in place."""
    if can_run_fused(hidden, weight):
        from fastrl.kernels.linear import linear_statistics

        linear_statistics(statistics, hidden, weight, labels, transform, tile, entropy=entropy)
        return
    logits = matmul(hidden, weight.t())
    update_row_statistics(statistics, logits, labels, transform, tile, entropy=entropy)


def tile_gradient(
    hidden: Tensor,  # [R, D]
    weight: Tensor,  # [S, D] rows of a tile of the vocabulary
    labels: Tensor,  # [R]
    statistics: TokenStatistics,  # of [R], over the whole vocabulary
    gradients: RowGradients,  # of [R]
    transform: LogitTransform,
    tile: VocabularyTile,
) -> Tensor:  # [R, S]
    """Gradient of the products h W^T of a tile, ready to be an operand of a matrix product."""
    if can_run_fused(hidden, weight):
        return _fused_gradient(hidden, weight, labels, statistics, gradients, transform, tile)
    return row_gradient(
        matmul(hidden, weight.t()),
        labels,
        statistics.logsumexp,
        statistics.entropy,
        gradients,
        transform,
        tile,
        operand_dtype=hidden.dtype,
    )


@dataclass(frozen=True)
class ScaledRows:
    """factors[:, None] * matrix, not multiplied out; None is 1."""

    matrix: Tensor  # [R, S]
    factors: Tensor | None  # [R] fp32

    def times(self, weight: Tensor) -> Tensor:
        """matrix W [R, D], in `compute_dtype`: the factors are for the caller to apply."""
        return matmul(self.matrix, weight)

    def transposed_times(self, hidden: Tensor, out: Tensor) -> None:
        """out [S, D] = (factors matrix)^T h, summed in `compute_dtype` and rounded to out's."""
        matmul_rounded(self.matrix.t(), self._scaled(hidden), out=out)

    def add_transposed_times(self, hidden: Tensor, total: Tensor) -> None:
        """total [S, D] += (factors matrix)^T h."""
        add_matmul_(total, self.matrix.t(), self._scaled(hidden))

    def column_sums(self) -> Tensor:
        """Sums over rows [S], in `compute_dtype`."""
        if can_run(self.matrix):
            from fastrl.kernels.row_scaling import column_sums

            return column_sums(self.matrix, self.factors)
        return self.matrix.sum(0, dtype=compute_dtype(self.matrix.dtype))

    def _scaled(self, hidden: Tensor) -> Tensor:
        if self.factors is None:
            return hidden
        from fastrl.kernels.row_scaling import scale_rows

        return scale_rows(hidden, self.factors, hidden.dtype)


class LogitsChunk:
    """A chunk of rows of the whole (local) vocabulary, from its statistics to its gradient.

    Attributes:
        running: [4, R] running statistics of the chunk's logits.
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
    ) -> None:
        self._hidden, self._weight, self._labels = hidden, weight, labels
        self._transform, self._tile = transform, tile
        dtype = compute_dtype(hidden.dtype)
        self.running = new_running_statistics(hidden.shape[0], dtype, hidden.device)
        self._references: Tensor | None = None
        if _keeps_exponentials(hidden, weight):
            from fastrl.kernels.linear import linear_exponentials

            self._logits = _new_operand(hidden, weight.shape[0], torch.bfloat16)
            self._references = linear_exponentials(
                self.running,
                self._logits,
                hidden,
                weight,
                labels,
                transform,
                tile,
                entropy=entropy,
            )
        else:
            self._logits = matmul(hidden, weight.t())
            update_row_statistics(
                self.running, self._logits, labels, transform, tile, entropy=entropy
            )

    def gradient(self, statistics: TokenStatistics, gradients: RowGradients) -> ScaledRows:
        """Gradient of the products, over the memory of the logits. To be called once.

        Args:
            statistics: of the whole vocabulary.
            gradients: of the loss, by the statistics.
        """
        if self._references is None:
            matrix = row_gradient(
                self._logits,
                self._labels,
                statistics.logsumexp,
                statistics.entropy,
                gradients,
                self._transform,
                self._tile,
                operand_dtype=self._hidden.dtype,
            )
            return ScaledRows(matrix, None)
        if gradients.entropy is not None and self._transform.softcap is not None:
            # log p cannot be had back from what is stored: the logits once more.
            matrix = _fused_gradient(
                self._hidden,
                self._weight,
                self._labels,
                statistics,
                gradients,
                self._transform,
                self._tile,
                out=self._logits,
            )
            return ScaledRows(matrix, None)
        from fastrl.kernels.exponentials import finish_exponentials

        factors = finish_exponentials(
            self._logits,
            self._references,
            self.running[LABEL],
            self._labels,
            statistics.logsumexp,
            statistics.entropy,
            gradients,
            self._transform,
            self._tile,
        )
        return ScaledRows(self._logits, factors)


def _keeps_exponentials(hidden: Tensor, weight: Tensor) -> bool:
    return can_run_fused(hidden, weight) and _has_exponentials(hidden, weight)


def _has_exponentials(hidden: Tensor, weight: Tensor) -> bool:
    """fp16 has too few exponents for exponentials as operands of a product."""
    is_wide = hidden.dtype == torch.bfloat16 or not hidden.is_cuda
    return is_wide and has_fused_layout(hidden, weight)


def _fused_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    statistics: TokenStatistics,
    gradients: RowGradients,
    transform: LogitTransform,
    tile: VocabularyTile,
    out: Tensor | None = None,
) -> Tensor:
    from fastrl.kernels.linear import linear_gradient

    matrix = _new_operand(hidden, weight.shape[0], hidden.dtype) if out is None else out
    linear_gradient(
        matrix,
        hidden,
        weight,
        labels,
        statistics.logsumexp,
        statistics.entropy,
        gradients,
        transform,
        tile,
    )
    return matrix


def _new_operand(hidden: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    """[R, S] with rows at multiples of 16 bytes."""
    padded = -(-num_columns // 8) * 8
    memory = torch.empty(hidden.shape[0], padded, dtype=dtype, device=hidden.device)
    return memory[:, :num_columns]
