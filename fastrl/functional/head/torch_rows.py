"""Row statistics and row gradients of a tile of logits in torch, for any device and dtype.

`fastrl.kernels` has a Triton kernel of the same name, signature and arguments for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.running import LABEL, MAX, SUM_EXP, SUM_SHIFTED, finite_or_zero
from fastrl.kernels.arguments import (
    PART_COLUMNS,
    LogitTransform,
    RowGradients,
    VocabularyTile,
    ceil_div,
)


def update_row_statistics(
    statistics: Tensor,  # [4, R]
    logits: Tensor,  # [R, S] raw products of this tile
    labels: Tensor,  # [R] of the whole vocabulary
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> None:
    """Merges a tile of the vocabulary into the running statistics, in place."""
    if tile.num_columns == 0:
        return
    z, _ = transformed(logits, transform, tile)
    maximum = torch.maximum(statistics[MAX], z.amax(1))
    shift = finite_or_zero(maximum)
    z_shifted = z - shift[:, None]
    exp = z_shifted.exp()
    old_shift = statistics[MAX] - shift
    old_scale = old_shift.exp()
    sum_exp = statistics[SUM_EXP] * old_scale
    if entropy:
        old = statistics[SUM_SHIFTED] * old_scale
        old = old + torch.where(sum_exp > 0, old_shift * sum_exp, 0)
        statistics[SUM_SHIFTED] = old + torch.where(exp > 0, z_shifted * exp, 0).sum(1)
    statistics[SUM_EXP] = sum_exp + exp.sum(1)
    statistics[MAX] = maximum
    column, inside = label_columns(labels, tile)
    picked = z.gather(1, column[:, None])[:, 0]
    statistics[LABEL] = torch.where(inside, picked, statistics[LABEL])


def row_parts(
    label_logits: Tensor,  # [R]
    logits: Tensor,  # [R, S] raw products of this tile
    labels: Tensor,  # [R] of the whole vocabulary
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> Tensor:  # [parts, 3, R]
    """m, s and u of each `PART_COLUMNS` columns, by sums whose order is written out.

    `label_logits` is written where the label is in the tile.
    """
    num_rows, num_parts = len(logits), ceil_div(logits.shape[1], PART_COLUMNS)
    if tile.num_columns == 0:
        parts = logits.new_zeros(num_parts, 3, num_rows)
        parts[:, 0] = -torch.inf
        return parts
    z, _ = transformed(logits, transform, tile)
    column, inside = label_columns(labels, tile)
    picked = z.gather(1, column[:, None])[:, 0]
    label_logits.copy_(torch.where(inside, picked, label_logits))
    missing = num_parts * PART_COLUMNS - z.shape[1]
    z = torch.nn.functional.pad(z, (0, missing), value=-torch.inf)
    z = z.view(num_rows, num_parts, PART_COLUMNS)
    maximum = z.amax(2)
    shifted = z - finite_or_zero(maximum)[:, :, None]
    exp = shifted.exp()
    sum_exp = _sum_by_halves(exp)
    sum_shifted = torch.zeros_like(sum_exp)
    if entropy:
        sum_shifted = _sum_by_halves(torch.where(exp > 0, shifted * exp, 0))
    return torch.stack([maximum, sum_exp, sum_shifted]).permute(2, 0, 1).contiguous()


def _sum_by_halves(values: Tensor) -> Tensor:  # [..., 2^n] -> [...]
    """Sums over the last dimension: additions of tensors alone, the same for every row."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def row_gradient(
    logits: Tensor,  # [R, S] raw products of this tile
    labels: Tensor,  # [R]
    logsumexp: Tensor,  # [R]
    entropy: Tensor | None,  # [R], needed with a gradient of the entropy
    gradients: RowGradients,
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    operand_dtype: torch.dtype,
) -> Tensor:  # [R, S]
    """Gradient of the raw products x of a tile, in compute dtype whatever `operand_dtype` is."""
    if tile.num_columns == 0:
        return torch.zeros_like(logits)
    z, cap_slope = transformed(logits, transform, tile)
    log_p = z - finite_or_zero(logsumexp)[:, None]
    p = log_p.exp()
    factor = -gradients.logprobs
    if gradients.logsumexp is not None:
        factor = factor + gradients.logsumexp
    dz = factor[:, None] * p
    if gradients.entropy is not None:
        assert entropy is not None
        slope = torch.where(p > 0, p * (log_p + entropy[:, None]), 0)
        dz -= gradients.entropy[:, None] * slope
    column, inside = label_columns(labels, tile)
    picked = torch.where(inside, gradients.logprobs, 0)
    dz.scatter_add_(1, column[:, None], picked[:, None])
    if isinstance(transform.temperature, Tensor):
        dz /= transform.temperature[:, None]
    elif transform.temperature != 1.0:
        dz /= transform.temperature
    if cap_slope is not None:
        dz *= cap_slope
    if transform.logit_scale != 1.0:
        dz *= transform.logit_scale
    return torch.nn.functional.pad(dz, (0, logits.shape[1] - tile.num_columns))


def label_columns(labels: Tensor, tile: VocabularyTile) -> tuple[Tensor, Tensor]:
    """Each label's column in the tile (clamped into it) and whether it lies in the tile."""
    column = labels - tile.first_column
    inside = (column >= 0) & (column < tile.num_columns)
    return column.clamp(0, tile.num_columns - 1), inside


def transformed(
    logits: Tensor, transform: LogitTransform, tile: VocabularyTile
) -> tuple[Tensor, Tensor | None]:
    """z of the valid columns and the slope of the cap there."""
    z = logits[:, : tile.num_columns]
    if tile.bias is not None:
        z = z + tile.bias[: tile.num_columns]
    if transform.logit_scale != 1.0:
        z = z * transform.logit_scale
    cap_slope = None
    if transform.softcap is not None:
        bounded = torch.tanh(z / transform.softcap)
        z, cap_slope = transform.softcap * bounded, 1 - bounded.square()
    if isinstance(transform.temperature, Tensor):
        z = z / transform.temperature[:, None]
    elif transform.temperature != 1.0:
        z = z / transform.temperature
    return z, cap_slope
