"""Products of pairs of rows and sums of scaled rows, in Triton where it runs, else in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.matmul import accumulation_dtype
from fastrl.functional.head.tiling import spans
from fastrl.kernels import can_run

# Elements of the gathered rows that exist at a time where torch gathers them: 16 MiB in fp32.
_GATHERED_ELEMENTS = 2**22


def gathered_products(
    hidden: Tensor,  # [R, D]
    weight: Tensor,  # [V, D]
    rows: Tensor,  # [N]; R for a pair that is not there
    columns: Tensor,  # [N]
) -> Tensor:  # [N] in accumulation_dtype
    """sum_d hidden[rows, d] weight[columns, d]; 0 for pairs that are not there."""
    if can_run(hidden) and can_run(weight):
        from fastrl.kernels.gathered_products import gathered_products as products

        return products(hidden, weight, rows, columns)
    dtype = accumulation_dtype(hidden.dtype)
    result = torch.zeros(len(rows), dtype=dtype, device=hidden.device)
    if len(hidden) == 0 or len(weight) == 0:
        return result
    is_there = rows < len(hidden)
    rows, columns = torch.where(is_there, rows, 0), torch.where(is_there, columns, 0)
    for start, stop in spans(len(rows), max(_GATHERED_ELEMENTS // hidden.shape[1], 1)):
        left = hidden[rows[start:stop]].to(dtype)
        result[start:stop] = (left * weight[columns[start:stop]].to(dtype)).sum(1)
    return torch.where(is_there, result, 0)


def write_segments(
    output: Tensor,  # [S, D]
    segments: Tensor,  # [N] in rising order
    factors: Tensor,  # [N] in accumulation_dtype
    source: Tensor,  # [M, D]
    rows: Tensor,  # [N]
    first: int = 0,
) -> None:
    """output[s] = sum of factors source[rows] over the pairs of segment first + s, rounded once.

    In the order of the pairs. Other pairs are left out; `output` must be 0 where there is no pair.
    """
    if can_run(source) and can_run(output):
        from fastrl.kernels.gathered_products import add_segments

        add_segments(output, segments, factors, source, rows, first)
        return
    # The pairs of these segments are a range of all, and no segment is cut by the chunks: a sum is
    # rounded once, also in 16 bits.
    begin, end = torch.searchsorted(
        segments, torch.tensor([first, first + len(output)], device=segments.device)
    ).tolist()
    if begin == end:
        return
    found, counts = torch.unique_consecutive(segments[begin:end], return_counts=True)
    places = torch.arange(len(found), device=segments.device).repeat_interleave(counts)
    sums = torch.zeros(len(found), output.shape[1], dtype=factors.dtype, device=output.device)
    for start, stop in spans(end - begin, max(_GATHERED_ELEMENTS // output.shape[1], 1)):
        chunk = slice(begin + start, begin + stop)
        scaled = source[rows[chunk]].to(factors.dtype) * factors[chunk, None]
        _add_in_order(sums, places[start:stop], scaled)
    output[found - first] = sums.to(output.dtype)


def _add_in_order(sums: Tensor, places: Tensor, values: Tensor) -> None:
    """sums[places] += values, in a fixed order: a GPU's `index_add_` has none."""
    if sums.is_cuda:
        sums.index_put_((places,), values, accumulate=True)
    else:
        sums.index_add_(0, places, values)
