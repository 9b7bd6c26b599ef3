"""The rewards of rollouts: those of their documents, one or several, and their sums."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import fsum, isnan
from operator import mul

from fastrl.data.documents import Document, DocumentError


def rollout_keys(documents: Sequence[Document]) -> list[Hashable]:
    """A key for each document's rollout; without a `rollout_id` that is the document alone."""
    return [
        number if document.rollout_id is None else (document.group_id, document.rollout_id)
        for number, document in enumerate(documents)
    ]


def rollout_rewards(documents: Sequence[Document]) -> dict[Hashable, float | None]:
    """The reward of each rollout by its key, in order: that of its scored documents, None without.

    Raises:
        DocumentError: for a document of another reward than its rollout.
    """
    return rollout_values(
        documents, [doc.reward if doc.is_scored else None for doc in documents], "reward"
    )


def rollout_values(
    documents: Sequence[Document], values: Sequence[float | None], field: str
) -> dict[Hashable, float | None]:
    """The value of each rollout by its key, in order: that of its documents which have one.

    Args:
        documents: whose rollouts.
        values: one a document, None for none.
        field: of the documents that the values are of.

    Raises:
        DocumentError: for a document of another value than its rollout.
    """
    found: dict[Hashable, float | None] = {}
    for number, (key, value) in enumerate(zip(rollout_keys(documents), values, strict=True)):
        if value is None:
            found.setdefault(key, None)
        elif found.get(key) in (None, value):
            found[key] = value
        else:
            problem = f"must be that of its rollout, {found[key]}, or None, got {value}"
            raise DocumentError(number, field, problem)
    return found


def combined_rewards(
    columns: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float] | None = None,
) -> list[float | None]:
    """The weighted sum of several rewards of the same documents; None if one of them is missing.

    A missing reward (None or NaN) is not a reward of 0: leaving it out of the sum would rank the
    document below others for what nobody measured.

    Args:
        columns: name -> one reward a document.
        weights: name -> factor, all of the columns; default 1.
    """
    if weights is not None and set(weights) != set(columns):
        raise ValueError(f"`weights` must name the columns {list(columns)}, got {list(weights)}")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"`columns` must be equally long, got {lengths}")
    factors = [1.0 if weights is None else weights[name] for name in columns]
    rewards: list[float | None] = []
    for values in zip(*columns.values(), strict=True):
        scored = [value for value in values if value is not None and not isnan(value)]
        is_whole = len(scored) == len(values)
        rewards.append(fsum(map(mul, factors, scored)) if is_whole else None)
    return rewards
