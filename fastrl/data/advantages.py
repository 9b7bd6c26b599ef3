"""Advantages of documents relative to the other answers to the same prompt. Host floats only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import fsum, isnan, sqrt
from operator import mul
from typing import Any, Literal

import torch

from fastrl.data.checks import check_document
from fastrl.data.columns import PER_TOKEN
from fastrl.data.documents import Document, DocumentError
from fastrl.data.prompt_groups import group_numbers

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["none", "group", "batch"]
ZeroVariance = Literal["keep", "drop"]


def with_group_advantages(
    documents: Sequence[Document],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    zero_variance: ZeroVariance = "keep",
) -> list[Document]:
    """Documents with the advantage of their reward in their group; see `group_advantages`.

    An unscored document gets no advantage and loses its labels (`without_labels`). Documents of one
    `rollout_id` are one member of their group: the reward of any of them is that of all, counts
    once, and gives all the same advantage.

    Args:
        documents: all with a `group_id`. Groups must be whole: all answers to a prompt.
        baseline: what is subtracted.
        scale: what is divided by.
        zero_variance: "keep" leaves groups whose rewards are all equal in, with an advantage of 0;
            "drop" passes the result through `without_zero_groups`.

    Raises:
        DocumentError: for a document without `group_id`, or of another reward than its rollout.
    """
    _check_choice("zero_variance", zero_variance, ("keep", "drop"))
    for number, document in enumerate(documents):
        if document.group_id is None:
            problem = "is required for a group-relative advantage, got none"
            raise DocumentError(number, "group_id", problem)
    rollouts = rollout_keys(documents)
    rewards = rollout_rewards(documents)
    groups = {key: document.group_id for key, document in zip(rollouts, documents, strict=True)}
    by_rollout = dict(
        zip(
            rewards,
            group_advantages(
                list(rewards.values()),
                [groups[key] for key in rewards],
                baseline=baseline,
                scale=scale,
            ),
            strict=True,
        )
    )
    advantages = [by_rollout[key] for key in rollouts]
    result = [
        without_labels(document) if advantage is None else replace(document, advantage=advantage)
        for document, advantage in zip(documents, advantages, strict=True)
    ]
    return result if zero_variance == "keep" else without_zero_groups(result)


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
    rewards: dict[Hashable, float | None] = {}
    for number, (key, document) in enumerate(zip(rollout_keys(documents), documents, strict=True)):
        if not document.is_scored:
            rewards.setdefault(key, None)
        elif rewards.get(key) in (None, document.reward):
            rewards[key] = document.reward
        else:
            problem = f"must be that of its rollout, {rewards[key]}, or None, got {document.reward}"
            raise DocumentError(number, "reward", problem)
    return rewards


def without_zero_groups(documents: Sequence[Document]) -> list[Document]:
    """Documents where groups whose advantages are all 0 have no labels (DAPO's filter).

    Such a group has no policy gradient, but with labels it counts in what the loss is divided by,
    and its KL and entropy terms act. Documents without advantage have no influence. A document
    without `group_id` is a group of its own.
    """
    numbers = group_numbers([document.group_id for document in documents])
    active = {
        number
        for number, document in zip(numbers, documents, strict=True)
        if has_advantage(document)
    }
    return [
        document if number in active else without_labels(document)
        for number, document in zip(numbers, documents, strict=True)
    ]


def has_advantage(document: Document) -> bool:
    """Whether the document, or any of its tokens, has an advantage other than 0."""
    return document.advantage is not None and bool(
        torch.any(torch.as_tensor(document.advantage) != 0)
    )


def without_labels(document: Document) -> Document:
    """The document as context only: no labels and no per-token values.

    It counts nowhere: neither in the sum of a loss nor in what the loss is divided by.
    """
    none: dict[str, Any] = dict.fromkeys(PER_TOKEN)
    return replace(document, prompt_length=len(document.tokens), loss_mask=None, **none)


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[Hashable],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    epsilon: float = 1e-4,
) -> list[float | None]:
    """Advantages of rewards relative to their group.

        A_i = (R_i - b_i) / (s + epsilon),   or R_i - b_i without scale
        b_i = mean of the group (mean), or of its other members (leave_one_out)

    None and NaN rewards are unscored: they get None and have no part in a baseline or a scale. The
    only scored member of a group gets 0, as there is nothing to compare it with.

    Args:
        rewards: of documents; finite, None or NaN.
        group_ids: of the same documents, in any order.
        baseline: "mean" (GRPO) or "leave_one_out" (RLOO).
        scale: "group": s is the sample standard deviation (n - 1) of the group's rewards, 0 for
            one; "batch": of all rewards; "none": Dr.GRPO, RLOO.
        epsilon: added to s.

    Returns:
        One advantage a reward, None for the unscored.

    References:
        DeepSeekMath, arXiv:2402.03300, section 4.1.2 (GRPO; its std is taken as TRL takes it, n - 1
        and epsilon). Ahmadian et al., arXiv:2402.14740, equation 8 (RLOO). Liu et al.,
        arXiv:2503.20783 (Dr.GRPO: no scale).
    """
    _check_choice("baseline", baseline, ("mean", "leave_one_out"))
    _check_choice("scale", scale, ("none", "group", "batch"))
    if len(rewards) != len(group_ids):
        raise ValueError(
            f"`group_ids` must have one value a reward ({len(rewards)}), got {len(group_ids)}"
        )
    groups: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for number, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        if reward is None or isnan(reward):
            continue
        if reward in (float("inf"), float("-inf")):
            raise DocumentError(number, "reward", f"must be finite, None or NaN, got {reward}")
        groups[group_id][number] = float(reward)
    batch_std = _sample_std([reward for scored in groups.values() for reward in scored.values()])
    advantages: list[float | None] = [None] * len(rewards)
    for scored in groups.values():
        std = batch_std if scale == "batch" else _sample_std(list(scored.values()))
        divisor = 1.0 if scale == "none" else std + epsilon
        for number, centred in _centred(scored, baseline).items():
            advantages[number] = centred / divisor
    return advantages


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


def _centred(scored: Mapping[int, float], baseline: Baseline) -> dict[int, float]:
    """Rewards minus their baseline; exactly 0 where all are equal, whatever their rounding."""
    count = len(scored)
    if count == 1 or min(scored.values()) == max(scored.values()):
        return dict.fromkeys(scored, 0.0)
    mean = fsum(scored.values()) / count
    # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
    factor = count / (count - 1) if baseline == "leave_one_out" else 1.0
    return {number: (reward - mean) * factor for number, reward in scored.items()}


def _sample_std(rewards: Sequence[float]) -> float:
    if len(rewards) < 2:
        return 0.0
    mean = fsum(rewards) / len(rewards)
    return sqrt(fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {list(choices)}, got {value!r}")


def with_kl_in_rewards(documents: Sequence[Document], coefficient: float) -> list[Document]:
    """Documents whose reward pays for the divergence from the reference policy.

        R' = R - coefficient * sum_t (logprob_t - ref_logprob_t)   over the tokens to be learned

    The k1 estimate of the document's KL(old, reference) as part of the reward has the KL's own
    gradient in the policy loss. Before advantages are computed; unscored documents stay unscored.

    Args:
        documents: with `logprobs` and `ref_logprobs`.
        coefficient: beta.

    Raises:
        DocumentError: for a scored document that lacks a column.

    References:
        Ouyang et al., arXiv:2203.02155, equation 2; Liu et al., arXiv:2510.01555.
    """
    result = []
    for number, document in enumerate(documents):
        if not document.is_scored:
            result.append(document)
            continue
        for field in ("logprobs", "ref_logprobs"):
            if getattr(document, field) is None:
                raise DocumentError(number, field, "is required for a KL in the reward, got none")
        values = check_document(number, document)
        old, reference = values["logprobs"].astype(float), values["ref_logprobs"].astype(float)
        divergence = fsum((old - reference).tolist())
        assert document.reward is not None
        result.append(replace(document, reward=document.reward - coefficient * divergence))
    return result
