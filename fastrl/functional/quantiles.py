"""Exact thresholds on counts or masses by a radix search, also of values sharded over ranks.

No rank receives another rank's values: four rounds (eight in float64) each all-reduce a histogram
of 256 bins per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.functional.metrics import wide
from fastrl.parallel import sum_over_ranks_

_DIGIT_BITS = 8
_NUM_DIGITS = 1 << _DIGIT_BITS


def ordered_keys(values: Tensor) -> Tensor:
    """int64 keys in the order of the values (fp32 or float64); -0 and 0 have one key."""
    values = values + 0.0  # -0 + 0 = 0
    if values.dtype == torch.float64:
        bits = values.view(torch.int64)
        return bits ^ ((bits >> 63) & (2**63 - 1))
    bits = values.view(torch.int32).long()
    return bits ^ ((bits >> 31) & (2**31 - 1))


def upper_threshold(
    values: Tensor,  # [R, S]
    weights: Tensor,  # [R, S]
    target: Callable[[Tensor], Tensor],
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:  # [R]
    """Key of the largest value v of each row whose values >= v weigh at least the target.

    Where the whole row weighs less, the key of the smallest value, or less.

    Args:
        values: fp32 or float64, no NaN; this rank's part of the row.
        weights: non-negative, any dtype; 0 excludes a value.
        target: function of the rows' total weights, [R] -> [R].
        groups: process groups over which the rows are sharded; every rank must call.
    """
    keys = ordered_keys(values)
    width = 64 if values.dtype == torch.float64 else 32
    threshold = torch.zeros(values.shape[0], dtype=torch.int64, device=values.device)
    above = weights.new_zeros(values.shape[0])
    wanted: Tensor | None = None
    for shift in range(width - _DIGIT_BITS, -1, -_DIGIT_BITS):
        # The first digit is signed in the key.
        offset = _NUM_DIGITS // 2 if wanted is None else 0
        digits = (keys >> shift) + offset
        if wanted is not None:
            digits = digits & (_NUM_DIGITS - 1)
        histogram = weights.new_zeros(values.shape[0], _NUM_DIGITS)
        histogram.scatter_add_(1, digits, weights)
        sum_over_ranks_(histogram, groups)
        upper = histogram.flip(1).cumsum(1).flip(1)  # weight of this digit and all above
        if wanted is None:
            wanted = target(upper[:, 0])
        heavy = above[:, None] + upper >= wanted[:, None]
        digit = (heavy.sum(1) - 1).clamp(min=0)
        above = above + (upper - histogram).gather(1, digit[:, None])[:, 0]
        weights = torch.where(digits == digit[:, None], weights, 0)
        threshold = threshold + ((digit - offset) << shift)
    return threshold


def top_fraction(
    values: Tensor,  # [T]
    mask: Tensor,  # [T]
    fraction: float,
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:  # [T]
    """Whether a value is at least the (1 - fraction) quantile of all ranks' masked values.

    The quantile interpolates linearly between neighbours (as `torch.quantile`), so these are the
    values at or above the order statistic of index ceil((1 - fraction) (n - 1)), n their number.

    Args:
        values: fp32 or float64 on this rank; no NaN where `mask`.
        mask: which values are included.
        fraction: between 0 and 1.
        groups: as in `upper_threshold`.
    """

    def count(total: Tensor) -> Tensor:
        # A position that is an integer up to rounding, such as 0.3 * 30, is that integer.
        position = (1 - fraction) * (total - 1).double() - 1e-9 * total
        return total - position.ceil().long()

    values = torch.where(mask, values, 0)
    threshold = upper_threshold(values[None], mask.long()[None], count, groups)
    return mask & (ordered_keys(values) >= threshold)


def mean_at_most(
    values: Tensor,  # [T]
    mask: Tensor,  # [T]
    bound: float,
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:  # [T]
    """Whether a value stays if the largest are dropped until the mean of the rest is at most bound.

    The fewest of all ranks' masked values are dropped, equal ones together; all of them where all
    are above the bound. A mean that exceeds the bound by rounding, 1e-12 of it, is at most the
    bound, so that the order of a sum does not matter.

    Args:
        values: non-negative, fp32 or float64 on this rank; no NaN where `mask`.
        mask: which values are included.
        bound: above 0.
        groups: as in `upper_threshold`.
    """
    # What is dropped exceeds the bound by at least what the sum of all does. Only values above the
    # bound are dropped, so that their excess, never negative, can be counted from the top.
    values = torch.where(mask, values, 0)
    excess = wide(values - bound)
    below = torch.where(mask, excess.clamp(max=0), 0).sum()[None]
    sum_over_ranks_(below, groups)
    above = torch.where(mask, excess.clamp(min=0), 0)
    threshold = upper_threshold(
        values[None], above[None], lambda total: total * (1 - 1e-12) + below, groups
    )
    return mask & (ordered_keys(values) < threshold)


def largest(
    values: Tensor,  # [T]
    mask: Tensor,  # [T]
    number: Tensor,  # []
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:  # [T]
    """Whether a value is one of the `number` largest of all ranks' masked values.

    Values equal to the last of them are too; all masked values where there are fewer.

    Args:
        values: fp32 or float64 on this rank; no NaN where `mask`.
        mask: which values are included.
        number: int64, at least 1, the same on all ranks.
        groups: as in `upper_threshold`.
    """
    values = torch.where(mask, values, 0)
    threshold = upper_threshold(values[None], mask.long()[None], lambda _: number[None], groups)
    return mask & (ordered_keys(values) >= threshold)
