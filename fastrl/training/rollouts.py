"""The documents of a step, and what their sources share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from fastrl.config.advantages import AdvantageConfig
from fastrl.data.advantages import without_zero_groups
from fastrl.data.documents import Document
from fastrl.data.prompt_groups import group_by_prompt
from fastrl.data.rollout_rewards import rollout_rewards
from fastrl.training.advantages import RewardKL
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
        uses_weights: whether documents of a step are made by the weights of the step before.
        longest: the most tokens that a document can have.
        digests: SHA-256 of the files that the documents come from, by their path.
    """

    items: ShuffledItems[Any]
    uses_weights: bool = True
    longest: int
    digests: Mapping[str, str]

    def start(self) -> None:
        """Checks what is not of this machine, before the run begins; all processes must call.

        Raises:
            UserError: on all processes.
        """
        return None

    def next(self, reward_kl: RewardKL | None = None) -> Rollouts:
        """The documents of the next step; all processes must call.

        Args:
            reward_kl: with `kl_in_reward` of the phase.
        """
        ...

    def close(self) -> None:
        """Ends what goes on beside the run."""
        return None


def split_groups(documents: list[Document], parts: int) -> list[list[Document]]:
    """The documents in at most `parts` lists of whole groups, about as many groups in each."""
    whole = group_by_prompt(documents)
    bounds = [len(whole) * part // parts for part in range(parts + 1)]
    split = [whole[start:stop] for start, stop in itertools.pairwise(bounds)]
    return [[document for group in part for document in group] for part in split if part]


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
