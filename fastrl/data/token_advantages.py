"""Advantages that differ from token to token, and what is done to those of a whole step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import exp, fsum
from typing import Literal

import numpy as np

from fastrl.data.advantages import check_groups, without_labels
from fastrl.data.checks import check_document
from fastrl.data.documents import Document, DocumentError
from fastrl.data.group_estimators import less_optimal_token_baseline, sample_std
from fastrl.data.rollout_rewards import rollout_keys, rollout_rewards
from fastrl.data.token_values import as_token_values, values_of_labels

Whiten = Literal["tokens", "rollouts"]


def with_optimal_token_advantages(documents: Sequence[Document]) -> list[Document]:
    """Documents with R - b_t at each label t, b_t the baseline of least variance there.

    See `less_optimal_token_baseline` of `group_estimators.py`; t counts the labels of a rollout,
    through all of its documents. Unscored documents lose their labels.

    Args:
        documents: all with a `group_id`, those of scored rollouts with `logprobs` and
            `sum_squares`. Groups must be whole.

    Raises:
        DocumentError: for a document without a `group_id` or a column, or of another reward than
            its rollout.

    References:
        The Optimal Token Baseline, arXiv:2602.07078.
    """
    check_groups(documents)
    keys, rewards = rollout_keys(documents), rollout_rewards(documents)
    energies: dict[Hashable, list[float]] = {key: [] for key in rewards}
    groups: defaultdict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for number, (key, document) in enumerate(zip(keys, documents, strict=True)):
        if (reward := rewards[key]) is not None:
            groups[document.group_id][key] = reward
            energies[key] += _energies(number, document)
    advantages: dict[Hashable, list[float]] = {}
    for members in groups.values():
        paths = [energies[key] for key in members]
        found = less_optimal_token_baseline(list(members.values()), paths)
        advantages |= dict(zip(members, found, strict=True))
    result = []
    taken: defaultdict[Hashable, int] = defaultdict(int)
    for number, (key, document) in enumerate(zip(keys, documents, strict=True)):
        if rewards[key] is None:
            result.append(without_labels(document))
            continue
        first = taken[key]
        taken[key] += document.num_labels
        values = as_token_values(number, document, advantages[key][first : taken[key]])
        result.append(replace(document, advantage=values))
    return result


def _energies(number: int, document: Document) -> list[float]:
    """1 - 2 p + sum of squared probabilities of each label."""
    if not document.has_labels:
        return []
    for field in ("logprobs", "sum_squares"):
        if getattr(document, field) is None:
            problem = "is required for an optimal token baseline, got none"
            raise DocumentError(number, field, problem)
    check_document(number, document)
    logprobs = values_of_labels(number, document, "logprobs")
    squares = values_of_labels(number, document, "sum_squares")
    return [1 - 2 * exp(lp) + square for lp, square in zip(logprobs, squares, strict=True)]


def with_whitened_advantages(
    documents: Sequence[Document], over: Whiten, *, epsilon: float = 1e-4
) -> list[Document]:
    """Documents whose advantages have mean 0 and variance 1 over the step.

        A' = (A - mean) / (std + epsilon),   std of the sample (n - 1)

    Exactly 0 where all are equal. Documents without advantage have no part.

    Args:
        documents: of the whole step.
        over: "tokens": mean and std are over labels; "rollouts": over rollouts, whose advantage
            must be a number.
        epsilon: added to std.

    References:
        REINFORCE++, arXiv:2501.03262; GDPO, arXiv:2601.05242.
    """
    taking_part = {n: doc for n, doc in enumerate(documents) if doc.advantage is not None}
    values = {n: values_of_labels(n, doc, "advantage") for n, doc in taking_part.items()}
    counted = [value for each in values.values() for value in each]
    if over == "rollouts":
        keys = rollout_keys(documents)
        of_rollout = {keys[number]: doc.advantage for number, doc in taking_part.items()}
        counted = [advantage for advantage in of_rollout.values() if isinstance(advantage, float)]
        assert len(counted) == len(of_rollout), "a rollout must have one advantage"
    if len(counted) < 2 or min(counted) == max(counted):
        mean, std = counted[0] if counted else 0.0, 0.0
    else:
        mean, std = fsum(counted) / len(counted), sample_std(counted)
    result = list(documents)
    for number, document in taking_part.items():
        if isinstance(document.advantage, float):
            whitened: float | list[float] = (document.advantage - mean) / (std + epsilon)
        else:
            each = [(value - mean) / (std + epsilon) for value in values[number]]
            whitened = as_token_values(number, document, each)
        result[number] = replace(document, advantage=whitened)
    return result


def with_clamped_advantages(
    documents: Sequence[Document], low: float, high: float
) -> list[Document]:
    """Documents whose advantages are clamped to [`low`, `high`]."""
    result = []
    for document in documents:
        advantage = document.advantage
        if advantage is not None:
            clamped = np.clip(np.asarray(advantage, np.float64), low, high).tolist()
            document = replace(document, advantage=clamped)
        result.append(document)
    return result
