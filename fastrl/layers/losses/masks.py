"""Per-token values with zeros where a token must not count."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs


def masked(values: Tensor, mask: Tensor) -> Tensor:  # [T], [T]
    """`values` where `mask`, and exactly 0 (also in the gradient) elsewhere, NaN or not."""
    return torch.where(mask, values, 0)


def at_labels(values: Tensor, batch: BatchKwargs) -> Tensor:  # [T]
    """`values` at the labels of the batch, and exactly 0 elsewhere as `masked`."""
    return values if batch.all_labelled else masked(values, batch.labels != -100)
