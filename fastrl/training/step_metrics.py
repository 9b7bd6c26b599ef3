"""The metrics of a step from those of its updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

_COUNTS = ("tokens", "documents")
_OF_AN_UPDATE = ("loss", "grad_norm", "learning_rate", "single_pass")


@dataclass(frozen=True)
class UpdateMetrics:
    """The numbers of one update.

    Attributes:
        values: by name, as `finish_metrics` gives them.
        labels: that the update's means were taken over, on all processes.
        documents: those with labels.
        is_skipped: whether the gradients were not finite, and nothing was updated.
    """

    values: Mapping[str, float]
    labels: int
    documents: int
    is_skipped: bool = False


class PendingUpdate:
    """The numbers of one update on their way to the host, in one transfer.

    The copy is queued behind the update: who reads it waits for the update, not for what the device
    was given since.

    Args:
        values: scalars by name, as `finish_metrics` gives them, `grad_norm` among them.
        counts: labels and documents with labels of the update, on all processes.
        known: further metrics, of the host.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        counts: tuple[int | Tensor, int | Tensor],
        known: Mapping[str, float],
    ) -> None:
        device = values["grad_norm"].device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        numbers = torch.stack([zero + value for value in (*values.values(), *counts)])
        self._names, self._known = tuple(values), known
        self._numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._arrived = torch.cuda.Event(enable_timing=True)
            self._arrived.record(torch.cuda.current_stream(device))

    @cached_property
    def metrics(self) -> UpdateMetrics:
        """The numbers; waits for the update when first asked for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        *numbers, labels, documents = self._numbers.tolist()
        values = {**dict(zip(self._names, numbers, strict=True)), **self._known}
        is_skipped = not math.isfinite(values["grad_norm"])
        return UpdateMetrics(values, int(labels), int(documents), is_skipped)

    def seconds_after(self, earlier: PendingUpdate) -> float | None:
        """From the end of an update to that of this one, both read; None without a GPU's clock."""
        if self._arrived is None or earlier._arrived is None:
            return None
        milliseconds: float = earlier._arrived.elapsed_time(self._arrived)
        return milliseconds / 1e3


def combine_updates(updates: Sequence[UpdateMetrics]) -> dict[str, float]:
    """The metrics of a step over its updates, as if all their tokens had been one update's.

    By name, where n are an update's labels:

        x_min, x_max        minimum, maximum over the updates with labels
        tokens, documents   sum
        x_variance          E[x^2] - E[x]^2 with E = sum n E_n / sum n of each moment
        x_ess               E[x]^2 / E[x^2]
        x beside x_share    a mean over documents; n are then those that have a value
        loss, grad_norm, learning_rate, single_pass   of an update: their mean
        any other           sum n x / sum n

    Args:
        updates: that were made, none of them skipped.
    """
    if len(updates) == 1:
        return dict(updates[0].values)
    names = list(dict.fromkeys(name for update in updates for name in update.values))
    return {
        name: _combined(name, [update for update in updates if name in update.values])
        for name in names
    }


def _combined(name: str, updates: Sequence[UpdateMetrics]) -> float:
    values = [update.values[name] for update in updates]
    leaf = name.rpartition("/")[2]
    base, _, kind = name.rpartition("_")
    if leaf in _COUNTS:
        return sum(values)
    if leaf in _OF_AN_UPDATE:
        return fmean(values)
    if kind in ("min", "max"):
        known = [update.values[name] for update in updates if update.labels] or [0.0]
        return min(known) if kind == "min" else max(known)
    if kind in ("variance", "ess") and base in updates[0].values:
        mean, square = _mean(base, updates), _mean_square(base, updates)
        if kind == "variance":
            return max(square - mean**2, 0.0)
        return mean**2 / square if square else 0.0
    return _mean(name, updates)


def _mean(name: str, updates: Sequence[UpdateMetrics]) -> float:
    return _weighted(
        [update.values[name] for update in updates], [_weight(name, update) for update in updates]
    )


def _mean_square(name: str, updates: Sequence[UpdateMetrics]) -> float:
    squares = [update.values[f"{name}_variance"] + update.values[name] ** 2 for update in updates]
    return _weighted(squares, [_weight(name, update) for update in updates])


def _weight(name: str, update: UpdateMetrics) -> float:
    """How many values the mean of an update was taken over."""
    if name.endswith("_share"):
        return update.documents
    share = update.values.get(f"{name}_share")
    return update.labels if share is None else share * update.documents


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    products = (value * weight for value, weight in zip(values, weights, strict=True))
    return sum(products) / total if total else 0.0
