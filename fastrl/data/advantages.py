"""Advantages of documents relative to the other answers to the same prompt. Host floats only.

What is computed of one group's rewards stands in `group_estimators.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import fsum, isfinite, isinf, isnan
from typing import Any, Literal

import torch

from fastrl.data.columns import PER_TOKEN
from fastrl.data.documents import Document, DocumentError
from fastrl.data.group_estimators import (
    less_best_of_k,
    less_best_without,
    less_length_weighted_mean,
    less_mean,
    less_mean_of_others,
    sample_std,
)
from fastrl.data.prompt_groups import group_numbers
from fastrl.data.reward_kl import with_kl_in_rewards
from fastrl.data.rollout_rewards import (
    combined_rewards,
    rollout_keys,
    rollout_rewards,
    rollout_values,
)

__all__ = [
    "combined_rewards",
    "group_advantages",
    "has_advantage",
    "with_group_advantages",
    "with_kl_in_rewards",
    "without_labels",
    "without_zero_groups",
]

Baseline = Literal["mean", "leave_one_out", "length_weighted", "greedy", "none"]
Scale = Literal["none", "group", "batch", "mean"]
ZeroVariance = Literal["keep", "drop"]


def with_group_advantages(
    documents: Sequence[Document],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    zero_variance: ZeroVariance = "keep",
    pass_at: int = 1,
    reward_weights: Mapping[str, float] | None = None,
) -> list[Document]:
    """Documents with the advantage of their reward in their group; see `group_advantages`.

    An unscored document gets no advantage and loses its labels (`without_labels`). Documents of one
    `rollout_id` are one member of their group: the reward of any of them is that of all, counts
    once, and gives all the same advantage.

    Args:
        documents: all with a `group_id`. Groups must be whole: all answers to a prompt.
        baseline: what is subtracted; "greedy" is the `greedy_reward` of the rollout.
        scale: what is divided by.
        zero_variance: "keep" leaves groups whose rewards are all equal in, with an advantage of 0;
            "drop" passes the result through `without_zero_groups`.
        pass_at: the reward is that of the best of so many answers.
        reward_weights: by name, all of the `rewards` of the documents: each of these rewards gets
            advantages of its own, and their sum with these factors is the document's (GDPO).

    Raises:
        DocumentError: for a document without `group_id`, or of another reward than its rollout.

    References:
        GDPO, arXiv:2601.05242.
    """
    _check_choice("zero_variance", zero_variance, ("keep", "drop"))
    check_groups(documents)
    rollouts = rollout_keys(documents)
    groups = {key: document.group_id for key, document in zip(rollouts, documents, strict=True)}
    lengths = _lengths(documents) if baseline == "length_weighted" else None
    greedy = _greedy_rewards(documents) if baseline == "greedy" else None
    sums: list[list[float | None]] = []
    factors = {None: 1.0} if reward_weights is None else reward_weights
    for name in factors:
        rewards = rollout_rewards(documents) if name is None else _named_rewards(documents, name)
        sums.append(
            group_advantages(
                list(rewards.values()),
                [groups[key] for key in rewards],
                baseline=baseline,
                scale=scale,
                pass_at=pass_at,
                lengths=lengths,
                greedy=greedy,
            )
        )
    weights = {str(name): factor for name, factor in factors.items()}
    combined = combined_rewards(dict(zip(weights, sums, strict=True)), weights)
    return with_rollout_advantages(
        documents, dict(zip(groups, combined, strict=True)), zero_variance=zero_variance
    )


def with_rollout_advantages(
    documents: Sequence[Document],
    advantages: Mapping[Hashable, float | None],
    *,
    zero_variance: ZeroVariance = "keep",
) -> list[Document]:
    """Documents with the advantages of their rollouts; without labels where that is None."""
    given = [advantages[key] for key in rollout_keys(documents)]
    result = [
        without_labels(document) if advantage is None else replace(document, advantage=advantage)
        for document, advantage in zip(documents, given, strict=True)
    ]
    return result if zero_variance == "keep" else without_zero_groups(result)


def check_groups(documents: Sequence[Document]) -> None:
    """Refuses documents without a group.

    Raises:
        DocumentError: naming the first.
    """
    for number, document in enumerate(documents):
        if document.group_id is None:
            problem = "is required for a group-relative advantage, got none"
            raise DocumentError(number, "group_id", problem)


def _lengths(documents: Sequence[Document]) -> list[int]:
    """The labels of each rollout, in order."""
    lengths: defaultdict[Hashable, int] = defaultdict(int)
    for key, document in zip(rollout_keys(documents), documents, strict=True):
        lengths[key] += document.num_labels
    return list(lengths.values())


def _greedy_rewards(documents: Sequence[Document]) -> list[float | None]:
    """The reward of the greedy answer to each rollout's prompt, in order."""
    values = [document.greedy_reward for document in documents]
    return list(rollout_values(documents, values, "greedy_reward").values())


def _named_rewards(documents: Sequence[Document], name: str) -> dict[Hashable, float | None]:
    """One of several rewards of each rollout; None of those whose combined reward is none."""
    values: list[float | None] = []
    for number, document in enumerate(documents):
        rewards = document.rewards or {}
        if document.is_scored and name not in rewards:
            problem = f"must have `{name}`, got {sorted(rewards)}"
            raise DocumentError(number, "rewards", problem)
        values.append(rewards[name] if document.is_scored else None)
    return rollout_values(documents, values, "rewards")


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
    pass_at: int = 1,
    lengths: Sequence[int] | None = None,
    greedy: Sequence[float | None] | None = None,
) -> list[float | None]:
    """Advantages of rewards relative to their group.

        A_i = (R_i - b_i) / (s + epsilon),   or R_i - b_i without scale

        b_i = mean of the group (mean), or of its other members (leave_one_out)
              sum_j n_j R_j / sum_j n_j, n_j the length of answer j (length_weighted)
              the reward of the greedy answer (greedy); 0 (none)

    With `pass_at` k above 1, R_i is the mean of max S over all sets S of k members of the group
    with i, and b_i that over all sets (mean), or that of max (S without i) over the same sets
    (leave_one_out). It needs no drawing: S is counted by the rank of its best reward.

    None and NaN rewards are unscored: they get None and have no part in a baseline or a scale.
    Where the others are the baseline, the only scored member of a group gets 0, as there is nothing
    to compare it with; so do the members of a group that has fewer than `pass_at`.

    Args:
        rewards: of documents; finite, None or NaN.
        group_ids: of the same documents, in any order.
        baseline: of GRPO, RLOO, OPO, ReMax, in this order, or "none".
        scale: "group": s is the sample standard deviation (n - 1) of the group's rewards, 0 for
            one, and that of max S with `pass_at`; "batch": of all rewards; "mean": the mean of the
            group's rewards, none below 0 (MaxRL); "none": Dr.GRPO, RLOO.
        epsilon: added to s.
        pass_at: k; with "mean" and scale "none" or "group", or "leave_one_out" and "none".
        lengths: labels of the documents, for "length_weighted".
        greedy: rewards of the greedy answers, for "greedy"; a document without one is unscored.

    References:
        arXiv:2402.03300, section 4.1.2 (GRPO; std as TRL takes it), 2402.14740, equation 8 (RLOO),
        2503.20783 (Dr.GRPO), 2505.23585 (OPO), 2310.10505 (ReMax), 2602.02710 (MaxRL). pass@k:
        2508.10751 ("mean" and "group", for rewards of 0 and 1), 2505.15201 ("leave_one_out").
    """
    _check_options(baseline, scale, pass_at, lengths, greedy)
    if greedy is not None:
        rewards = _less_greedy(rewards, greedy)
    groups = _scored_groups(rewards, group_ids, refuses_negative=scale == "mean")
    batch_std = sample_std([reward for scored in groups.values() for reward in scored.values()])
    advantages: list[float | None] = [None] * len(rewards)
    for scored in groups.values():
        values = list(scored.values())
        weights = None if lengths is None else [lengths[number] for number in scored]
        centred, std = _centred(values, baseline, pass_at, weights)
        scales = {"group": std, "batch": batch_std, "mean": fsum(values) / len(values)}
        divisor = scales[scale] + epsilon if scale != "none" else 1.0
        for number, value in zip(scored, centred, strict=True):
            advantages[number] = value / divisor
    return advantages


def _centred(
    rewards: Sequence[float], baseline: Baseline, pass_at: int, lengths: Sequence[int] | None
) -> tuple[Sequence[float], float]:
    """The rewards of a group less their baselines, and the standard deviation in the group."""
    if pass_at > 1:
        centred, std = less_best_of_k(rewards, pass_at)
        return (centred if baseline == "mean" else less_best_without(rewards, pass_at)), std
    std = sample_std(rewards)
    if lengths is not None:
        return less_length_weighted_mean(rewards, lengths), std
    if baseline == "mean":
        return less_mean(rewards), std
    return (less_mean_of_others(rewards) if baseline == "leave_one_out" else rewards), std


def _less_greedy(
    rewards: Sequence[float | None], greedy: Sequence[float | None]
) -> list[float | None]:
    """The rewards less those of the greedy answers; None where one of the two is missing."""
    result: list[float | None] = []
    for number, (reward, base) in enumerate(zip(rewards, greedy, strict=True)):
        if base is not None and isinf(base):
            raise DocumentError(number, "greedy_reward", f"must be finite, got {base}")
        result.append(None if reward is None or base is None else reward - base)
    return result


def _scored_groups(
    rewards: Sequence[float | None], group_ids: Sequence[Hashable], *, refuses_negative: bool
) -> dict[Hashable, dict[int, float]]:
    """The scored rewards of each group by their number."""
    if len(rewards) != len(group_ids):
        raise ValueError(
            f"`group_ids` must have one value a reward ({len(rewards)}), got {len(group_ids)}"
        )
    groups: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for number, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        if reward is None or isnan(reward):
            continue
        if not isfinite(reward):
            raise DocumentError(number, "reward", f"must be finite, None or NaN, got {reward}")
        if refuses_negative and reward < 0:
            problem = f"must be at least 0 to be divided by the mean of its group, got {reward}"
            raise DocumentError(number, "reward", problem)
        groups[group_id][number] = float(reward)
    return groups


def _check_options(
    baseline: str, scale: str, pass_at: int, lengths: object, greedy: object
) -> None:
    """Refuses what is no baseline or scale, and combinations that mean nothing."""
    baselines = ("mean", "leave_one_out", "length_weighted", "greedy", "none")
    _check_choice("baseline", baseline, baselines)
    _check_choice("scale", scale, ("none", "group", "batch", "mean"))
    for name, values, of in (("lengths", lengths, "length_weighted"), ("greedy", greedy, "greedy")):
        if (values is not None) != (baseline == of):
            raise ValueError(f"`{name}` must be given with `baseline` {of} and only there")
    allowed = {"mean": ("none", "group"), "leave_one_out": ("none",)}
    if pass_at != 1 and (pass_at < 1 or scale not in allowed.get(baseline, ())):
        raise ValueError(
            "`pass_at` must be at least 1, and above 1 only with `baseline` mean and `scale` none"
            f" or group, or leave_one_out and none, got {pass_at} with {baseline} and {scale}"
        )
    if scale == "mean" and baseline != "mean":
        raise ValueError(f"`scale` mean must go with `baseline` mean, got {baseline}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {list(choices)}, got {value!r}")
