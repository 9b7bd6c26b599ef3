"""A histogram as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

_BINS = 10
_WIDTH = 40


def histogram(values: Sequence[float]) -> list[str]:
    """One line for each value, or for each of ten equal intervals where there are more values.

    Args:
        values: finite numbers; integers give intervals of integers.
    """
    array = np.asarray(values)
    if len(array) == 0:
        return []
    distinct, counts = np.unique(array, return_counts=True)
    if len(distinct) <= _BINS:
        labels = [f"{value:.4g}" if array.dtype.kind == "f" else f"{value:,}" for value in distinct]
    elif array.dtype.kind == "f":
        counts, edges = np.histogram(array, bins=_BINS)
        labels = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
    else:
        low, high = int(array.min()), int(array.max())
        step = -(-(high - low + 1) // _BINS)
        starts = range(low, high + 1, step)
        counts = np.array([((array >= s) & (array < s + step)).sum() for s in starts])
        labels = [f"{s:,} to {min(s + step - 1, high):,}" for s in starts]
    width = max(map(len, labels))
    largest = int(counts.max())
    lines = []
    for label, count in zip(labels, counts.tolist(), strict=True):
        bar = "#" * -(-_WIDTH * count // largest)
        lines.append(f"{label:>{width}} {bar:<{_WIDTH}} {count:,}")
    return lines
