"""Operations on tiles of logits, on the fastest backend that runs.

With fused kernels (`can_run_fused`) no logits reach memory; otherwise a matrix product in fp32 is
followed by a row operation, in Triton where it runs (`can_run`), else in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastrl.functional.head import torch_rows
from fastrl.functional.head.matmul import accumulation_dtype, matmul
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels import can_run, can_run_fused, has_fused_layout
from fastrl.kernels.arguments import LogitTransform, RowGradients, VocabularyTile

if TYPE_CHECKING:
    from fastrl.kernels.linear import LinearGradient


def keeps_no_logits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether statistics of these operands need no logits in memory, and so no tiles."""
    return can_run_fused(hidden, weight)


def gradient_itemsize(hidden: Tensor, weight: Tensor) -> int:
    """Bytes per element of the tiles of `recompute`'s backward."""
    if can_run_fused(hidden, weight):
        return hidden.dtype.itemsize
    return accumulation_dtype(hidden.dtype).itemsize


def chunk_itemsize(hidden: Tensor, weight: Tensor) -> int:
    """Bytes per element of a chunk of `single_pass`; the same on all ranks of a `tp` group."""
    return 2 if _has_exponentials(hidden, weight) else accumulation_dtype(hidden.dtype).itemsize


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


class TileGradients:
    """Gradients of the products h W^T of some rows, one tile of the vocabulary after the other."""

    def __init__(
        self,
        hidden: Tensor,  # [R, D]
        weight: Tensor,  # [1, D] of any tile
        labels: Tensor,  # [R]
        statistics: TokenStatistics,  # of [R], over the whole vocabulary
        gradients: RowGradients,  # of [R]
        transform: LogitTransform,
    ) -> None:
        self._hidden, self._labels, self._transform = hidden, labels, transform
        self._statistics, self._gradients = statistics, gradients
        self._fused: LinearGradient | None = None
        if can_run_fused(hidden, weight):
            from fastrl.kernels.linear import LinearGradient

            lse, entropy = statistics.logsumexp, statistics.entropy
            self._fused = LinearGradient(hidden, labels, lse, entropy, gradients, transform)

    def of(
        self,
        weight: Tensor,  # [S, D] rows of a tile
        tile: VocabularyTile,
    ) -> Tensor:  # [R, S]
        """The gradient of a tile, ready to be an operand of a matrix product."""
        if self._fused is not None:
            matrix = new_operand(self._hidden, weight.shape[0], self._hidden.dtype)
            self._fused(matrix, weight, tile)
            return matrix
        logits = matmul(self._hidden, weight.t())
        rows = (self._labels, self._statistics, self._gradients, self._transform)
        return row_gradient(logits, *rows, tile, self._hidden.dtype)


def update_row_statistics(
    statistics: Tensor,  # [4, R]
    logits: Tensor,  # [R, S]
    labels: Tensor,  # [R]
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> None:
    """`torch_rows.update_row_statistics`, in Triton where it runs."""
    if can_run(logits):
        from fastrl.kernels.row_statistics import update_row_statistics as update
    else:
        update = torch_rows.update_row_statistics
    update(statistics, logits, labels, transform, tile, entropy=entropy)


def row_gradient(
    logits: Tensor,  # [R, S]
    labels: Tensor,  # [R]
    statistics: TokenStatistics,  # of [R]
    gradients: RowGradients,
    transform: LogitTransform,
    tile: VocabularyTile,
    operand_dtype: torch.dtype,
) -> Tensor:  # [R, S]
    """`torch_rows.row_gradient`, in Triton where it runs."""
    if can_run(logits):
        from fastrl.kernels.row_gradient import row_gradient as gradient
    else:
        gradient = torch_rows.row_gradient
    return gradient(
        logits,
        labels,
        statistics.logsumexp,
        statistics.entropy,
        gradients,
        transform,
        tile,
        operand_dtype=operand_dtype,
    )


def keeps_exponentials(hidden: Tensor, weight: Tensor) -> bool:
    """Whether a chunk of `single_pass` is of exponentials, and not of logits."""
    return can_run_fused(hidden, weight) and _has_exponentials(hidden, weight)


def _has_exponentials(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `single_pass` keeps exponentials: fp16 has too few exponents for them."""
    is_wide = hidden.dtype == torch.bfloat16 or not hidden.is_cuda
    return is_wide and has_fused_layout(hidden, weight)


def new_operand(hidden: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    """[R, S] with rows at multiples of 16 bytes."""
    padded = -(-num_columns // 8) * 8
    memory = torch.empty(hidden.shape[0], padded, dtype=dtype, device=hidden.device)
    return memory[:, :num_columns]
