"""Sums of scaled rows by segments in torch, for any device and dtype.

`fastrl.kernels.segment_sums` has Triton kernels of the same names, signatures and arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.tiling import spans
from fastrl.functional.head.torch_entries import GATHERED_ELEMENTS


def add_segments(
    output: Tensor,  # [S, D]
    segments: Tensor,  # [N] in rising order
    order: Tensor,  # [N]
    factors: Tensor,  # [M] in accumulation_dtype
    source: Tensor,  # [K, D]
    rows: Tensor,  # [M]
    *,
    onto_zeros: bool,
) -> None:
    """output[s] += sum of factors[i] source[rows[i]] over the i = order[n] of segment s.

    In the order of the pairs, and rounded once to output's dtype. What has no factor other than 0
    is neither read nor written; pairs of segments from S on are left out. Output is not read where
    it is said to be 0 (`onto_zeros`).
    """
    used = ((segments < len(output)) & (factors[order] != 0)).nonzero()[:, 0]
    if len(used) == 0:
        return
    entries = order[used]
    found, counts = torch.unique_consecutive(segments[used], return_counts=True)
    places = torch.arange(len(found), device=segments.device).repeat_interleave(counts)
    sums = torch.zeros(len(found), output.shape[1], dtype=factors.dtype, device=output.device)
    _add_scaled(sums, places, factors[entries], source, rows[entries])
    if not onto_zeros:
        sums += output[found]
    output[found] = sums.to(output.dtype)


def write_rows(
    output: Tensor,  # [R, D], or [T, D]
    slots: Tensor,  # [R] of T
    offsets: Tensor,  # [T + 1]
    factors: Tensor,  # [N] in accumulation_dtype
    source: Tensor,  # [K, D]
    columns: Tensor,  # [N]
    *,
    at_slots: bool,
) -> None:
    """output[r], or output[slots[r]], = sum of factors source[columns] over the slot's entries.

    In the order of the entries, and rounded once; source rows of factor 0 are not read.
    """
    first, counts = offsets[slots], offsets[slots + 1] - offsets[slots]
    places = torch.arange(len(slots), device=slots.device).repeat_interleave(counts)
    ends = counts.cumsum(0)
    entries = torch.arange(len(places), device=slots.device) + (first - ends + counts)[places]
    used = (factors[entries] != 0).nonzero()[:, 0]
    places, entries = places[used], entries[used]
    sums = torch.zeros(len(slots), output.shape[1], dtype=factors.dtype, device=output.device)
    _add_scaled(sums, places, factors[entries], source, columns[entries])
    if at_slots:
        output[slots] = sums.to(output.dtype)
    else:
        output.copy_(sums)


def _add_scaled(
    sums: Tensor,  # [S, D]
    places: Tensor,  # [N]
    factors: Tensor,  # [N]
    source: Tensor,  # [K, D]
    rows: Tensor,  # [N]
) -> None:
    """sums[places] += factors source[rows], in their order: a GPU's `index_add_` has none."""
    for start, stop in spans(len(places), max(GATHERED_ELEMENTS // max(sums.shape[1], 1), 1)):
        chunk = slice(start, stop)
        scaled = source[rows[chunk]].to(factors.dtype) * factors[chunk, None]
        if sums.is_cuda:
            sums.index_put_((places[chunk],), scaled, accumulate=True)
        else:
            sums.index_add_(0, places[chunk], scaled)
