"""Row statistics and row gradients of a tile of logits: the two vocabulary-sized operations.

Each has a plain PyTorch version, for any device and dtype, and a Triton kernel of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastrl.functional.statistics import LABEL, MAX, SUM_EXP, SUM_SHIFTED, finite_or_zero


@dataclass(frozen=True)
class LogitTransform:
    """z = cap(logit_scale (x + bias)) / temperature of raw products x = h W^T, in this order."""

    temperature: float | Tensor = 1.0  # [R] when each row has its own
    softcap: float | None = None
    logit_scale: float = 1.0

    def rows(self, index: Tensor | slice | None) -> LogitTransform:
        """The transform of some of the rows."""
        if index is None or not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature[index])


@dataclass(frozen=True)
class RowGradients:
    """Upstream gradients of the row statistics; None is zero."""

    logprobs: Tensor  # [R]
    entropy: Tensor | None  # [R]
    logsumexp: Tensor | None  # [R]

    def rows(self, index: Tensor | slice) -> RowGradients:
        """The gradients of some of the rows."""
        return RowGradients(
            self.logprobs[index],
            None if self.entropy is None else self.entropy[index],
            None if self.logsumexp is None else self.logsumexp[index],
        )


def update_row_statistics(
    statistics: Tensor,  # [4, R]
    logits: Tensor,  # [R, S] raw products of this tile
    labels: Tensor,  # [R] of the whole vocabulary
    transform: LogitTransform,
    *,
    bias: Tensor | None,  # [S]
    first_column: int,
    num_columns: int,
    entropy: bool,
) -> None:
    """Merges a tile of the vocabulary into the running statistics, in place.

    Args:
        statistics: max m, s = sum e^(z-m), u = sum (z-m) e^(z-m) and z[label] of the columns so far.
        logits: fp32 (fp64) products; left as they are.
        labels: int64; labels outside of this tile match nothing.
        transform: how products become z.
        bias: of this tile's columns.
        first_column: vocabulary index of the tile's first column.
        num_columns: columns of the tile that belong to the vocabulary; the rest is padding.
        entropy: whether u is kept.
    """
    z, _ = _transformed(logits, transform, bias, num_columns)
    if num_columns == 0:
        return
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
    column = labels - first_column
    inside = (column >= 0) & (column < num_columns)
    picked = z.gather(1, column.clamp(0, num_columns - 1)[:, None])[:, 0]
    statistics[LABEL] = torch.where(inside, picked, statistics[LABEL])


def row_gradient(
    logits: Tensor,  # [R, S] raw products of this tile
    labels: Tensor,  # [R]
    logsumexp: Tensor,  # [R]
    entropy: Tensor | None,  # [R], needed with a gradient of the entropy
    gradients: RowGradients,
    transform: LogitTransform,
    *,
    bias: Tensor | None,  # [S]
    first_column: int,
    num_columns: int,
) -> Tensor:  # [R, S]
    """Gradient of the raw products x of a tile.

    dz = g_logprob (onehot - p) + g_logsumexp p - g_entropy p (log p + entropy), then through
    temperature, cap and scale. Columns of padding get exactly 0.
    """
    z, cap_slope = _transformed(logits, transform, bias, num_columns)
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
    column = labels - first_column
    inside = (column >= 0) & (column < num_columns)
    if num_columns > 0:
        picked = torch.where(inside, gradients.logprobs, 0)
        dz.scatter_add_(1, column.clamp(0, num_columns - 1)[:, None], picked[:, None])
    if isinstance(transform.temperature, Tensor):
        dz /= transform.temperature[:, None]
    elif transform.temperature != 1.0:
        dz /= transform.temperature
    if cap_slope is not None:
        dz *= cap_slope
    if transform.logit_scale != 1.0:
        dz *= transform.logit_scale
    if num_columns == logits.shape[1]:
        return dz
    return torch.nn.functional.pad(dz, (0, logits.shape[1] - num_columns))


def _transformed(
    logits: Tensor, transform: LogitTransform, bias: Tensor | None, num_columns: int
) -> tuple[Tensor, Tensor | None]:
    """z of the valid columns and the slope of the cap there."""
    z = logits[:, :num_columns]
    if bias is not None:
        z = z + bias[:num_columns]
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
