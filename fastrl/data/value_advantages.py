"""Advantages and returns from the values of a value head. Host floats only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum, sqrt

from fastrl.data.advantages import without_labels
from fastrl.data.checks import check_document
from fastrl.data.documents import Document, DocumentError
from fastrl.data.group_estimators import sample_variance
from fastrl.data.token_values import as_token_values, values_of_labels


def generalised_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> list[float]:
    """Generalised advantage estimates of the actions of one episode, the last of which ends it.

        delta_t = r_t + gamma V_{t+1} - V_t,    V = 0 behind the last action
        A_t = delta_t + gamma lam A_{t+1}

    Args:
        rewards: of each action, such as a token.
        values: of the states that the actions were taken in.
        gamma: discount, from 0 to 1.
        lam: from 0 (one step) to 1 (the whole return minus the value).

    References:
        Schulman et al., arXiv:1506.02438, equations 11 and 16.
    """
    _check_share("gamma", gamma)
    _check_share("lam", lam)
    if len(rewards) != len(values):
        raise ValueError(
            f"`rewards` must have one a value ({len(values)}), got {len(rewards)} rewards"
        )
    advantages: list[float] = []
    following_value = following_advantage = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * following_value - value
        following_advantage = delta + gamma * lam * following_advantage
        following_value = value
        advantages.append(following_advantage)
    return advantages[::-1]


def with_value_advantages(
    documents: Sequence[Document],
    *,
    gamma: float = 1.0,
    lam: float | None = None,
    returns_lam: float | None = None,
    length_alpha: float | None = None,
    whiten: bool = False,
) -> list[Document]:
    """Documents with advantages and returns from their `values` and the reward at their end.

        A = generalised_advantages(rewards, values) with `lam`
        R = the same with `returns_lam`, + values

    over the labels of the whole document: tokens between them, such as the answers of a tool, are
    passed over. The reward counts at the last label. Whatever advantage and returns a document has
    are replaced; an unscored one loses its labels.

    Args:
        documents: with `values`, each one an episode; under `whiten` all of the optimizer step.
        gamma: discount.
        lam: of the advantages, 0.95 if neither it nor `length_alpha` is given.
        returns_lam: of the returns; default: that of the advantages. VAPO and VC-PPO take 1.
        length_alpha: takes `lam` = 1 - 1 / (alpha l) for a document of l labels, not below 0.
        whiten: advantages minus their mean over all labels, over sqrt(variance (n - 1) + 1e-8).

    Raises:
        DocumentError: a scored document without values, or one of several of its rollout.
        ValueError: `lam` beside `length_alpha`, or a number out of its range.

    References:
        Schulman et al., arXiv:1506.02438; decoupled and length-adaptive lambda: VAPO,
        arXiv:2504.05118, sections 4.1 and 4.2.
    """
    _check_rollouts(documents)
    result: list[Document] = []
    advantages: dict[int, list[float]] = {}
    for number, document in enumerate(documents):
        if not document.is_scored:
            result.append(without_labels(document))
            continue
        values = _label_values(number, document)
        rewards = [0.0] * len(values)
        if values:
            assert document.reward is not None
            rewards[-1] = document.reward
        used = _lam(lam, length_alpha, len(values))
        found = generalised_advantages(rewards, values, gamma=gamma, lam=used)
        advantages[number] = found
        if returns_lam is not None:
            found = generalised_advantages(rewards, values, gamma=gamma, lam=returns_lam)
        returns = [advantage + value for advantage, value in zip(found, values, strict=True)]
        result.append(replace(document, returns=as_token_values(number, document, returns)))
    for number, of_labels in (_whitened(advantages) if whiten else advantages).items():
        by_token = as_token_values(number, documents[number], of_labels)
        result[number] = replace(result[number], advantage=by_token)
    return result


def _lam(lam: float | None, length_alpha: float | None, num_labels: int) -> float:
    """Lambda of the advantages of a document."""
    if length_alpha is None:
        return 0.95 if lam is None else lam
    if lam is not None:
        raise ValueError(
            f"`lam` must not be given with `length_alpha`, which replaces it, got {lam} and"
            f" {length_alpha}"
        )
    if not length_alpha > 0:
        raise ValueError(f"`length_alpha` must be above 0, got {length_alpha}")
    return max(1 - 1 / (length_alpha * max(num_labels, 1)), 0.0)


def _label_values(number: int, document: Document) -> list[float]:
    """The values at the labels of a document."""
    if document.values is None:
        raise DocumentError(number, "values", "is required for advantages from values, got none")
    check_document(number, document)
    return values_of_labels(number, document, "values")


def _whitened(advantages: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """(A - mean) / sqrt(variance + 1e-8) over all labels; 0 where all are equal."""
    every = [value for of_document in advantages.values() for value in of_document]
    if len(set(every)) < 2:
        return {number: [0.0] * len(values) for number, values in advantages.items()}
    mean = fsum(every) / len(every)
    scale = 1 / sqrt(sample_variance(every) + 1e-8)
    return {
        number: [(value - mean) * scale for value in values]
        for number, values in advantages.items()
    }


def _check_rollouts(documents: Sequence[Document]) -> None:
    """Refuses rollouts of several documents: one reward would count once in each."""
    keys = [(document.group_id, document.rollout_id) for document in documents]
    counts = Counter(keys)
    for number, (document, key) in enumerate(zip(documents, keys, strict=True)):
        if document.rollout_id is not None and counts[key] > 1:
            problem = (
                f"must be that of one document for advantages from values, got {counts[key]} of"
                f" {document.rollout_id!r}; join the parts of a rollout, with `loss_mask`"
            )
            raise DocumentError(number, "rollout_id", problem)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1, got {value}")
