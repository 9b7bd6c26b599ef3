"""Statistics of parts of the vocabulary, of a row whatever the other rows of the batch are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastrl.functional.head import torch_rows
from fastrl.functional.head.matmul import matmul_alike
from fastrl.kernels import can_run_fused
from fastrl.kernels.arguments import LogitTransform, VocabularyTile


def tile_parts(
    label_logits: Tensor,  # [R]
    hidden: Tensor,  # [R, D]
    weight: Tensor,  # [S, D] rows of a tile of the vocabulary, from a multiple of PART_COLUMNS on
    labels: Tensor,  # [R]
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> Tensor:  # [parts, 3, R]
    """Reference, s and u of each `PART_COLUMNS` columns, of every row whatever the others are.

    `label_logits` is written where the label is in the tile.
    """
    if can_run_fused(hidden, weight):
        from fastrl.kernels.linear import linear_parts

        return linear_parts(label_logits, hidden, weight, labels, transform, tile, entropy=entropy)
    if not isinstance(transform.temperature, Tensor):
        # Devices divide by a number and by a tensor in different ways.
        ones = torch.ones_like(label_logits)
        transform = replace(transform, temperature=ones * transform.temperature)
    logits = matmul_alike(hidden, weight)
    return torch_rows.row_parts(label_logits, logits, labels, transform, tile, entropy=entropy)
