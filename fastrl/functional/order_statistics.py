"""Order statistics of values that are spread over ranks: a radix search on counts.

No rank ever holds another rank's values: four rounds (eight in float64) each sum a histogram of
256 numbers over the ranks. The result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_DIGIT_BITS = 8
_NUM_DIGITS = 1 << _DIGIT_BITS


def ordered_keys(values: Tensor) -> Tensor:
    """int64 keys in the order of the values (fp32 or float64); -0 and 0 have one key."""
    values = values + 0.0  # -0 + 0 = 0
    if values.dtype == torch.float64:
        bits = values.view(torch.int64)
        return bits ^ ((bits >> 63) & (2**63 - 1))
    bits = values.float().view(torch.int32).long()
    return bits ^ ((bits >> 31) & (2**31 - 1))


def key_digits(dtype: torch.dtype) -> range:
    """Shifts of the digits of a key of values of `dtype`, the most significant first."""
    width = 64 if dtype == torch.float64 else 32
    return range(width - _DIGIT_BITS, -1, -_DIGIT_BITS)


def key_digit(keys: Tensor, shift: int, first: bool) -> Tensor:
    """The digit at `shift`, in [0, 256); the first one is signed in the key."""
    digit = keys >> shift
    return digit + _NUM_DIGITS // 2 if first else digit & (_NUM_DIGITS - 1)


def top_fraction(
    values: Tensor,  # [T]
    mask: Tensor,  # [T]
    fraction: float,
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:  # [T]
    """Whether a value is at least the (1 - fraction) quantile of all ranks' masked values.

    The quantile interpolates linearly between neighbours (as `torch.quantile`), so the mask is that
    of values at or above the order statistic of index ceil((1 - fraction) (n - 1)), n their number.

    Args:
        values: fp32 or float64 on this rank; no NaN where `mask`.
        mask: which of them take part.
        fraction: between 0 and 1.
        groups: between whose ranks the values are spread; every rank must call.
    """
    keys = ordered_keys(values)
    candidates = mask
    threshold = torch.zeros((), dtype=torch.int64, device=values.device)
    index: Tensor | None = None
    for shift in key_digits(values.dtype):
        first = index is None
        digits = key_digit(keys, shift, first)
        histogram = torch.zeros(_NUM_DIGITS, dtype=torch.int64, device=values.device)
        histogram.scatter_add_(0, digits.clamp(0, _NUM_DIGITS - 1), candidates.long())
        for group in groups:
            if group is not None:
                dist.all_reduce(histogram, group=group)
        cumulative = histogram.cumsum(0)
        if index is None:
            index = ((1 - fraction) * (cumulative[-1] - 1).double()).ceil().long()
        digit = (cumulative <= index).sum().clamp(max=_NUM_DIGITS - 1)
        index = index - torch.where(digit > 0, cumulative[(digit - 1).clamp(min=0)], 0)
        candidates = candidates & (digits == digit)
        threshold = threshold + ((digit - _NUM_DIGITS // 2 if first else digit) << shift)
    return mask & (keys >= threshold)
