"""Rarer statistics of tokens under the head, each computed only when it is asked for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.full_rows import full_rows, label_logits, row_logsumexp, row_maximum
from fastrl.functional.head.sharding import to_columns, vocabulary_sum

StatisticName = Literal["mean_logit", "sum_squares", "is_argmax"]
STATISTIC_NAMES: tuple[StatisticName, ...] = ("mean_logit", "sum_squares", "is_argmax")


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

    In a pass of its own over the logits, a chunk of rows at a time (`full_rows`).

    Raises:
        ValueError: a name is not known.
    """
    unknown = sorted(set(names) - set(STATISTIC_NAMES))
    if unknown:
        raise ValueError(f"`statistics` must be among {list(STATISTIC_NAMES)}, got {unknown}.")
    wanted = [name for name in STATISTIC_NAMES if name in names]
    if not wanted:
        return {}
    tp = call.groups.tp
    tile = call.tile()

    def statistics(z: Tensor, rows: Tensor) -> Tensor:
        values: list[Tensor] = []
        for name in wanted:
            if name == "mean_logit":
                values.append(vocabulary_sum(z.sum(1), tp) / call.vocab_size)
            elif name == "sum_squares":
                logsumexp = to_columns(row_logsumexp(z, tp), tp)
                squares = (2 * (z - logsumexp[:, None])).exp()
                values.append(vocabulary_sum(squares.sum(1), tp))
            else:
                label = label_logits(z.detach(), call.labels[rows], tile, tp)
                values.append((label >= row_maximum(z, tp)).to(z.dtype))
        return torch.stack(values)

    outputs = full_rows(call, statistics, len(wanted), gradient_rows=gradient_rows)
    result = dict(zip(wanted, outputs.unbind(), strict=True))
    if "is_argmax" in result:
        result["is_argmax"] = result["is_argmax"].detach() > 0.5
    return {str(name): value for name, value in result.items()}
