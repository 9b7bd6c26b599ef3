"""Metrics of a part of the step's tokens, in the form that `fastrl.functional.metrics` adds up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.functional.metrics import EXTREME, wide
from fastrl.layers.losses.base import masked
from fastrl.layers.losses.normalisation import at_least_one, draw_weighted


def token_mean(values: Tensor, batch: BatchKwargs) -> Tensor:  # [..., T] -> [...]
    """This part's share of the mean of `values` over the labels of the batch."""
    total = draw_weighted(masked(wide(values), batch.labels != -100), batch).sum(-1)
    return total / at_least_one(batch.num_labels_in_batch)


def token_means(
    columns: Mapping[str, Tensor],  # [T] each
    batch: BatchKwargs,
) -> dict[str, Tensor]:
    """`token_mean` of several columns in one reduction."""
    means = token_mean(torch.stack(list(columns.values())), batch)
    return dict(zip(columns, means.unbind(), strict=True))


def document_mean(values: Tensor, batch: BatchKwargs) -> Tensor:  # [T]
    """This part's share of the mean over documents of a value that is one per document."""
    shares = masked(values, batch.labels != -100) / batch.label_counts.clamp(min=1)
    return draw_weighted(wide(shares), batch).sum() / at_least_one(batch.num_documents_in_batch)


def moments(name: str, values: Tensor, batch: BatchKwargs) -> dict[str, Tensor]:  # [T]
    """Mean, mean square, minimum and maximum of `values` over the labels of the batch."""
    values = wide(values)
    mask = batch.labels != -100
    extreme = torch.full_like(values, EXTREME)
    return {
        name: token_mean(values, batch),
        f"{name}_squared": token_mean(values.square(), batch),
        f"{name}_min": _flat(torch.where(mask, values, extreme), EXTREME).amin(),
        f"{name}_max": _flat(torch.where(mask, values, -extreme), -EXTREME).amax(),
    }


def _flat(values: Tensor, empty: float) -> Tensor:
    """`values`, or one element `empty` where there are none."""
    return values if values.numel() else values.new_full((1,), empty)
