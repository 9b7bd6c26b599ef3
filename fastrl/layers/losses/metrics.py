"""Metrics that add up over chunks, micro-batches and ranks.

A metric is a sum over tokens divided by a count of the whole optimizer step, like a loss: the
step's value is the sum of the parts' values, never a mean of means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.functional.batch import BatchKwargs
from fastrl.layers.losses.base import at_least_one, masked


def token_mean(values: Tensor, batch: BatchKwargs) -> Tensor:  # [T]
    """This part's share of the mean of `values` over the labels of the batch."""
    total = masked(values, batch.labels != -100).sum()
    return total / at_least_one(batch.num_labels_in_batch)


def add_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of several parts (micro-batches) of one step together."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {
        name: torch.stack([part[name] for part in parts if name in part]).sum(0) for name in names
    }


def reduce_metrics(
    metrics: Mapping[str, Tensor], groups: Sequence[ProcessGroup | None]
) -> dict[str, Tensor]:
    """The metrics of all ranks of `groups` together: one packed all-reduce a group.

    Every rank must hold the same names, which follow from the config alone.
    """
    present = [group for group in groups if group is not None]
    if not metrics or not present:
        return dict(metrics)
    packed = torch.stack([value.double() for value in metrics.values()])
    for group in present:
        dist.all_reduce(packed, group=group)
    return dict(zip(metrics, packed.unbind(), strict=True))
