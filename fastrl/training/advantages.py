"""From the rewards of a step's documents to their advantages, as the config of a phase says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fastrl.config.advantages import AdvantageConfig, KLInRewardConfig, OverlongShapingConfig
from fastrl.data.advantages import with_group_advantages
from fastrl.data.documents import Document
from fastrl.data.reward_kl import kl_of_labels, less_kl, less_kl_to_go
from fastrl.data.reward_shaping import completion_length, overlong_punishment
from fastrl.data.rollout_rewards import rollout_keys
from fastrl.data.token_advantages import (
    with_clamped_advantages,
    with_optimal_token_advantages,
    with_whitened_advantages,
)
from fastrl.layers.losses.kl import KLCoefficient


@dataclass
class RewardKL:
    """What the rewards of a phase pay for the divergence from the reference policy.

    Attributes:
        config: of the phase.
        coefficient: in force, adapted after each step.
        reference: gives documents their `ref_logprobs`; None where they have them.
    """

    config: KLInRewardConfig
    coefficient: KLCoefficient
    reference: Callable[[Sequence[Document]], list[Document]] | None = None


def with_advantages(
    documents: Sequence[Document],
    config: AdvantageConfig,
    max_new_tokens: int | None = None,
    *,
    reward_kl: RewardKL | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> tuple[list[Document], dict[str, float]]:
    """Documents with the advantage of their reward, and the metrics of what was added to it.

    Args:
        documents: whole groups, each document with a `group_id`; they keep their reward.
        config: shaping, baseline, scale and what else is done.
        max_new_tokens: of the sampler; None for documents of files.
        reward_kl: with `kl_in_reward` of the config; its coefficient is then adapted to this step.
        reward_weights: by name, of the several rewards of `aggregation: normalise_then_sum`.
    """
    metrics: dict[str, float] = {}
    shaped = list(documents)
    if config.reward_clamp is not None:
        shaped = _with_clamped_rewards(shaped, *config.reward_clamp)
    if config.shaping is not None and documents:
        shaped, metrics = _with_shaping(shaped, config.shaping, max_new_tokens)
    estimates: list[list[float] | None] = []
    if reward_kl is not None:
        shaped, estimates, kl_metrics = _with_reward_kl(shaped, reward_kl)
        metrics |= kl_metrics
    if config.baseline == "optimal_token":
        relative = with_optimal_token_advantages(shaped)
    else:
        relative = with_group_advantages(
            shaped,
            baseline=config.baseline,
            scale=config.scale,
            pass_at=config.pass_at,
            reward_weights=reward_weights,
        )
    if config.kl_in_reward is not None and config.kl_in_reward.level == "token":
        relative = less_kl_to_go(relative, metrics["reward_kl_coefficient"], estimates)
    if config.whiten != "none":
        relative = with_whitened_advantages(relative, config.whiten)
    if config.clamp is not None:
        relative = with_clamped_advantages(relative, *config.clamp)
    result = [
        replace(document, reward=before.reward)
        for document, before in zip(relative, documents, strict=True)
    ]
    return result, metrics


def _with_clamped_rewards(documents: Sequence[Document], low: float, high: float) -> list[Document]:
    return [
        replace(document, reward=min(max(document.reward, low), high))
        if document.is_scored and document.reward is not None
        else document
        for document in documents
    ]


def _with_shaping(
    documents: Sequence[Document], shaping: OverlongShapingConfig, max_new_tokens: int | None
) -> tuple[list[Document], dict[str, float]]:
    """Documents whose reward has the punishment of their rollout's length."""
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
    return shaped, {"overlong_punishment": fmean(punishments)}


def _with_reward_kl(
    documents: Sequence[Document], reward_kl: RewardKL
) -> tuple[list[Document], list[list[float] | None], dict[str, float]]:
    """Documents with the KL in their rewards at level `document`, its estimates and metrics."""
    kl, coefficient = reward_kl.config, reward_kl.coefficient.value
    result = list(documents)
    if reward_kl.reference is not None:
        result = reward_kl.reference(result)
    estimates = kl_of_labels(result, kl.estimator, kl.clamp)
    with_labels = [values for values in estimates if values]
    mean = fmean([each for values in with_labels for each in values]) if with_labels else 0.0
    reward_kl.coefficient.end_step(mean, len(with_labels))
    if kl.level == "document":
        result = less_kl(result, coefficient, estimates)
    return result, estimates, {"reward_kl": mean, "reward_kl_coefficient": coefficient}
