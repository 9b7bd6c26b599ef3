"""Metrics that add up over chunks, micro-batches and ranks.

The suffix of a metric's name determines how its parts are combined: `*_min` and `*_max` by minimum
and maximum, all others by sum. A mean over tokens is therefore a sum divided by a count of the
whole optimizer step, as in a loss: the step's value is the sum of the parts' values, never a mean
of means. What does not add up is derived at the end from what does (`finish_metrics`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.parallel import gather_first_dim

# The extreme of no values: finite, so that a part without tokens can be stored as it is.
EXTREME = torch.finfo(torch.float32).max
# Metrics that are importance weights: their effective sample size is derived.
_WEIGHTS = ("ratio", "rollout_weight")


def add_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The combined metrics of several parts (micro-batches) of one step.

        sum over the parts, or minimum of `*_min`, maximum of `*_max`

    Args:
        parts: the `metrics` of several `HeadOutput`s whose batches had the counts of the whole step
            (`BatchCounts`), by name scalars.
    """
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {
        name: _combine(name, torch.stack([part[name] for part in parts if name in part]))
        for name in names
    }


def reduce_metrics(
    metrics: Mapping[str, Tensor], groups: Sequence[ProcessGroup | None]
) -> dict[str, Tensor]:
    """The step's metrics over all ranks of `groups`, finished: one packed collective a group.

    Every rank must hold the same names, which follow from the config and the batch's columns.

    Args:
        metrics: of this rank's part of the step, from `add_metrics`.
        groups: over whose ranks losses add up: `head.loss_groups`. None is one rank.

    Returns:
        Scalars on the device by name, equal on all ranks; see `finish_metrics`.

    Raises:
        TypeError: `groups` are not process groups one by one.
    """
    if not isinstance(groups, Iterable):
        raise TypeError(
            "`groups` must be a sequence of process groups, such as `head.loss_groups`, got a"
            f" {type(groups).__name__}"
        )
    present = [group for group in groups if group is not None]
    if metrics and present:
        packed = torch.stack([wide(value) for value in metrics.values()])
        for group in present:
            parts = gather_first_dim(packed, group).view(-1, len(metrics))
            combined = [_combine(name, parts[:, column]) for column, name in enumerate(metrics)]
            packed = torch.stack(combined)
        metrics = dict(zip(metrics, packed.unbind(), strict=True))
    return finish_metrics(metrics)


def finish_metrics(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics of a whole step, with those derived from their sums.

    `x_variance` = E[x^2] - E[x]^2 replaces `x_squared`; weights have `x_ess` = E[x]^2 / E[x^2],
    their effective sample size as a share of the tokens; a mean over some of the documents is
    divided by their share `x_share`; an extreme of no tokens is 0. Beside `x_error`, the rest of x
    that a prediction leaves, `explained_variance` is 1 - Var[x_error] / Var[x], 0 where x is all
    equal.

    Args:
        metrics: the sums of all parts and ranks. `reduce_metrics` finishes its own.
    """
    finished: dict[str, Tensor] = {}
    for name, value in metrics.items():
        base, _, kind = name.rpartition("_")
        leaf = base.rpartition("/")[2]
        share = metrics.get(f"{base if kind == 'squared' else name}_share")
        if share is not None:
            value = value / share.clamp(min=torch.finfo(share.dtype).tiny)
        if kind in ("min", "max"):
            value = torch.where(value.abs() >= EXTREME, 0, value)
        if kind != "squared" or base not in metrics:
            finished[name] = value
            continue
        mean = finished[base]
        finished[f"{base}_variance"] = (value - mean.square()).clamp(min=0)
        if leaf in _WEIGHTS:
            tiny = torch.finfo(value.dtype).tiny
            finished[f"{base}_ess"] = mean.square() / value.clamp(min=tiny)
    for name in [name for name in finished if name.endswith("_error_variance")]:
        whole = finished.get(name.replace("_error_variance", "_variance"))
        if whole is not None:
            prefix = name[: name.rfind("/") + 1]
            share = 1 - finished[name] / torch.where(whole > 0, whole, 1)
            finished[f"{prefix}explained_variance"] = torch.where(whole > 0, share, 0)
    return finished


def _combine(name: str, parts: Tensor) -> Tensor:  # [N]
    """The parts of a metric, combined by the suffix of its name."""
    if name.endswith("_min"):
        return parts.amin(0)
    if name.endswith("_max"):
        return parts.amax(0)
    return parts.sum(0)


def wide(values: Tensor) -> Tensor:
    """`values` in `wide_dtype`."""
    return values.to(wide_dtype(values.device))


def deviations(
    values: Tensor,  # float64
    mean: Tensor,  # []
) -> Tensor:
    """values - mean, and 0 where that is the rounding of the mean: of values that are all equal."""
    differences = values - mean
    return torch.where(differences.abs() <= 1e-12 * mean.abs(), 0, differences)


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it: sums then do not depend on the split."""
    return torch.float32 if device.type == "mps" else torch.float64
