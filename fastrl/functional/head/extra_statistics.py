"""Rarer per-token statistics of the head, each computed only on request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.full_rows import LogitRows, full_rows

StatisticName = Literal["mean_logit", "sum_squares", "is_argmax"]
STATISTIC_NAMES: tuple[StatisticName, ...] = ("mean_logit", "sum_squares", "is_argmax")


def check_names(names: Collection[str], deterministic: bool = False) -> None:
    """Refuses what is no collection of the statistics' names, and any beside `deterministic`."""
    if isinstance(names, str):
        raise ValueError(
            f"`statistics` must be a collection of names, got {names!r}; give {[names]}."
        )
    unknown = sorted(set(names) - set(STATISTIC_NAMES))
    if unknown:
        raise ValueError(f"`statistics` must be among {list(STATISTIC_NAMES)}, got {unknown}.")
    if deterministic and names:
        raise ValueError(
            f"`statistics` must not be given with `deterministic`, got {list(names)}: their sums"
            " depend on the other rows of the batch; leave out one of the two."
        )


def extra_statistics(
    call: HeadCall,
    names: Collection[str],
    *,
    gradient_rows: Tensor | None = None,  # [G]
) -> dict[str, Tensor]:
    """The named statistics of z [T, V], [T] each, 0 at slots without label.

        mean_logit = (1 / V) sum_v z_v           dz = 1 / V
        sum_squares = sum_v p_v^2                dz = 2 p (p - sum_squares)
        is_argmax = z[label] >= max_v z_v        bool, no gradient

    Computed in a separate pass over the logits (`full_rows`).

    Raises:
        ValueError: a name is not known.
    """
    check_names(names)
    wanted = [name for name in STATISTIC_NAMES if name in names]
    if not wanted:
        return {}

    vocab_size = call.vocab_size  # not the call, whose tensors the graph would keep

    def statistics(rows: LogitRows) -> Tensor:
        values: list[Tensor] = []
        for name in wanted:
            if name == "mean_logit":
                values.append(rows.sum(rows.z) / vocab_size)
            elif name == "sum_squares":
                log_p = rows.z - rows.to_columns(rows.logsumexp())
                values.append(rows.sum((2 * log_p).exp()))
            else:
                values.append((rows.label_logits() >= rows.maximum()).to(rows.z.dtype).detach())
        return torch.stack(values)

    outputs = full_rows(call, statistics, len(wanted), gradient_rows=gradient_rows)
    result = dict(zip(wanted, outputs.unbind(), strict=True))
    if "is_argmax" in result:
        result["is_argmax"] = result["is_argmax"].detach() > 0.5
    return {str(name): value for name, value in result.items()}
