"""The documents of a step, and what their sources share: advantages and filters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

from fastrl.config.phases import AdvantageConfig
from fastrl.data.advantages import (
    rollout_keys,
    rollout_rewards,
    with_group_advantages,
    without_zero_groups,
)
from fastrl.data.documents import Document
from fastrl.data.prompt_groups import group_by_prompt
from fastrl.data.reward_shaping import completion_length, overlong_punishment
from fastrl.training.order import ShuffledItems


@dataclass(frozen=True)
class Sample:
    """One completion as a person reads it."""

    prompt: str
    completion: str
    reward: float
    finished: bool


@dataclass(frozen=True)
class Rollouts:
    """The documents of a step, with advantages.

    Attributes:
        documents: those that influence the loss; dropped groups are left out.
        metrics: of all completions of the step.
        samples: some of the completions; none from files.
    """

    documents: list[Document]
    metrics: dict[str, float]
    samples: list[Sample]


class RolloutSource(Protocol):
    """A source of documents, step after step.

    Attributes:
        items: what steps are made of; a checkpoint holds their position.
        longest: the most tokens that a document can have.
        digests: SHA-256 of the files that the documents come from, by their path.
    """

    items: ShuffledItems[Any]
    longest: int
    digests: Mapping[str, str]

    def next(self) -> Rollouts:
        """The documents of the next step."""
        ...


def split_groups(documents: list[Document], parts: int) -> list[list[Document]]:
    """The documents in at most `parts` lists of whole groups, about as many groups in each."""
    whole = group_by_prompt(documents)
    bounds = [len(whole) * part // parts for part in range(parts + 1)]
    split = [whole[start:stop] for start, stop in itertools.pairwise(bounds)]
    return [[document for group in part for document in group] for part in split if part]


def with_advantages(
    documents: Sequence[Document], config: AdvantageConfig, max_new_tokens: int | None = None
) -> tuple[list[Document], dict[str, float]]:
    """Documents with the advantage of their shaped reward, and the metric of the shaping.

    Args:
        documents: whole groups, each document with a `group_id`; they keep their reward.
        config: shaping, baseline and scale.
        max_new_tokens: of the sampler; None for documents of files.
    """
    shaping, metrics = config.shaping, {}
    shaped = list(documents)
    if shaping is not None and documents:
        max_length, cache_length = shaping.resolved(max_new_tokens)
        keys = rollout_keys(documents)
        lengths: Counter[Hashable] = Counter()
        for key, document in zip(keys, documents, strict=True):
            lengths[key] += completion_length(document)
        punishments = [
            overlong_punishment(lengths[key], max_length=max_length, cache_length=cache_length)
            for key in keys
        ]
        shaped = [
            document
            if document.reward is None
            else replace(document, reward=document.reward + punishment)
            for document, punishment in zip(documents, punishments, strict=True)
        ]
        metrics = {"overlong_punishment": fmean(punishments)}
    relative = with_group_advantages(shaped, baseline=config.baseline, scale=config.scale)
    result = [
        replace(document, reward=before.reward)
        for document, before in zip(relative, documents, strict=True)
    ]
    return result, metrics


def to_rollouts(
    documents: list[Document],
    config: AdvantageConfig,
    metrics: dict[str, float],
    samples: list[Sample],
) -> Rollouts:
    """A step without documents that have no labels, and without groups that `config` drops."""
    rewards = [reward for reward in rollout_rewards(documents).values() if reward is not None]
    if rewards:
        metrics = {"reward": fmean(rewards), **metrics}
    labelled = [document for document in documents if document.has_labels]
    active = [document for document in without_zero_groups(labelled) if document.has_labels]
    share = len(group_by_prompt(active)) / len(group_by_prompt(documents))
    kept = active if config.zero_variance == "drop" else labelled
    return Rollouts(kept, {**metrics, "active_groups": share}, samples)
