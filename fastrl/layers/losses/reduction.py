"""Metrics of a part of the step's tokens, in the form that `fastrl.functional.metrics` adds up.

All columns of a loss are made into one table: a launch then serves all of them, and launches are
what metrics cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.functional.metrics import EXTREME, wide, wide_dtype
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.normalisation import at_least_one, draw_weighted


def token_metrics(
    means: Mapping[str, Tensor],  # [T] each, of any dtypes
    moments: Mapping[str, Tensor],  # [T] each
    batch: BatchKwargs,
) -> dict[str, Tensor]:
    """This part's share of the means over the labels of the batch, of all columns at once.

    Of each of `moments` also the mean square `<name>_squared`, and its `<name>_min`, `<name>_max`.
    """
    columns = dict(means) | dict(moments)
    no_label = batch.labels == -100
    # The last rows are the squares.
    table = _table(columns, len(moments))
    values, squares = table[: len(columns)].masked_fill_(no_label, 0), table[len(columns) :]
    of_moments = values[len(means) :]
    if moments:
        torch.square(of_moments, out=squares)
    shares = draw_weighted(table, batch).sum(-1) / at_least_one(batch.num_labels_in_batch)
    of_columns, of_squares = shares[: len(columns)], shares[len(columns) :]
    metrics = dict(zip(columns, of_columns.unbind(), strict=True))
    if moments:
        extremes = _extremes(of_moments, no_label)
        for name, square, low, high in zip(moments, of_squares, *extremes, strict=True):
            metrics[f"{name}_squared"] = square
            metrics[f"{name}_min"], metrics[f"{name}_max"] = low, high
    return metrics


def token_mean(values: Tensor, batch: BatchKwargs) -> Tensor:  # [T] -> []
    """This part's share of the mean of `values` over the labels of the batch."""
    return token_metrics({"mean": values}, {}, batch)["mean"]


def document_mean(values: Tensor, batch: BatchKwargs) -> Tensor:  # [..., T] -> [...]
    """This part's share of the mean over documents of values that are one per document."""
    total = document_total(at_labels(values, batch), batch)
    return total / at_least_one(batch.num_documents_in_batch)


def document_total(values: Tensor, batch: BatchKwargs) -> Tensor:  # [..., T] -> [...]
    """This part's share of the sum over documents of values, 0 at slots without label."""
    shares = values / batch.label_counts.clamp(min=1)
    return draw_weighted(wide(shares), batch).sum(-1)


def _table(columns: Mapping[str, Tensor], num_others: int) -> Tensor:  # [K + num_others, T]
    """The columns in the wide dtype, and uninitialised rows below.

    Neighbours of one dtype take a launch to be joined and one to be converted, however many.
    """
    first = next(iter(columns.values()))
    size = (len(columns) + num_others, len(first))
    table = torch.empty(size, dtype=wide_dtype(first.device), device=first.device)
    start = 0
    for _, of_dtype in groupby(columns.values(), key=lambda column: column.dtype):
        joined = torch.stack(list(of_dtype))
        table[start : start + len(joined)] = joined
        start += len(joined)
    return table


def _extremes(
    values: Tensor,  # [M, T]
    no_label: Tensor,  # [T]
) -> tuple[Tensor, Tensor]:  # [M] each
    """Minimum and maximum at labels: those of no values are `EXTREME` and its negative."""
    if not values.shape[1]:
        none = values.new_full(values.shape[:1], EXTREME)
        return none, -none
    both = torch.cat([values, -values]).masked_fill_(no_label, EXTREME).amin(-1)
    low, high = both.view(2, -1)
    return low, -high
