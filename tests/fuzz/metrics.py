"""The metrics of docs/losses.md in plain loops over labels, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.config import PolicyGradientLossConfig
from fastrl.config.losses import (
    CrossEntropyLossConfig,
    DistillationLossConfig,
    DPOLossConfig,
    PositiveNLLLossConfig,
    SquaredLogRatioLossConfig,
    ZLossConfig,
)
from fastrl.functional.reference.head import documents
from fastrl.functional.reference.losses import covariances_to_drop
from fastrl.functional.reference.policy_gradient import (
    advantages_of,
    correction_weights,
    kl_estimate,
    token_ratio,
    token_weight,
    top_entropy_slots,
    with_old_policy,
)
from fastrl.functional.reference.tokens import BOUND, Tokens
from tests.fuzz.cases import VERSION

# The level of the ratio of each loss, if its config has none.
LEVELS = {
    "grpo": "token",
    "gspo": "document",
    "luspo": "document",
    "gspo_token": "document_token",
    "gmpo": "clipped_document",
    "vespo": "document_product",
    "dppo": "token",
    "clip_cov": "token",
    "kl_cov": "token",
    "reinforce": "none",
}
UNCLIPPED = ("reinforce", "sapo", "vespo", "kl_cov")


def metrics_of(
    config: Any, tokens: Tokens, loss: Tensor, columns: dict[str, Any]
) -> dict[str, Tensor]:
    """The metrics of a loss by name."""
    slots = [t for some in documents(tokens.document_index, tokens.labels) for t in some]
    numbers: dict[str, float] = {"loss": loss.item()}
    if isinstance(config, PolicyGradientLossConfig):
        numbers |= _policy(config, tokens, columns)
    elif isinstance(config, PositiveNLLLossConfig):
        assert tokens.advantages is not None
        positive = [float(tokens.advantages[t].item() > 0) for t in slots]
        numbers["positive_fraction"] = mean(positive)
    elif not isinstance(config, DistillationLossConfig | ZLossConfig):
        numbers["logprob"] = mean([tokens.logprobs[t].item() for t in slots])
    if isinstance(config, CrossEntropyLossConfig):
        assert tokens.entropy is not None
        numbers["entropy"] = mean([tokens.entropy[t].item() for t in slots])
    if isinstance(config, ZLossConfig):
        assert tokens.logsumexp is not None
        numbers["logsumexp"] = mean([tokens.logsumexp[t].item() for t in slots])
    if isinstance(config, DistillationLossConfig):
        assert tokens.divergence is not None
        numbers["divergence"] = mean([tokens.divergence[t].item() for t in slots])
    if isinstance(config, SquaredLogRatioLossConfig):
        numbers |= _log_ratios(config, tokens)
    if isinstance(config, DPOLossConfig):
        numbers |= _pairs(config, tokens)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def mean(values: Sequence[float]) -> float:
    """The mean, 0 of none."""
    return math.fsum(values) / max(len(values), 1)


def _moments(name: str, values: Sequence[float], *, is_weight: bool = False) -> dict[str, float]:
    squared = mean([value * value for value in values])
    found = {
        name: mean(values),
        f"{name}_min": min(values, default=0.0),
        f"{name}_max": max(values, default=0.0),
        f"{name}_variance": max(squared - mean(values) ** 2, 0.0),
    }
    if is_weight:
        found[f"{name}_ess"] = mean(values) ** 2 / squared if squared else 0.0
    return found


@dataclass(frozen=True)
class _Label:
    """What the metrics need of a labelled slot, at the loss's level."""

    slot: int
    ratio: float
    advantage: float
    weight: float
    is_low: bool
    is_high: bool


def _labels(config: PolicyGradientLossConfig, tokens: Tokens) -> Iterator[_Label]:
    options = config.model_dump()
    level = options.get("ratio_level") or LEVELS[config.type]
    assert tokens.advantages is not None
    assert tokens.old_logprobs is not None
    kept = top_entropy_slots(tokens, options)
    if config.type == "clip_cov":
        # The advantages are those with the teacher already.
        kept -= covariances_to_drop(tokens, options | {"on_policy_distillation": None})
    for slots in documents(tokens.document_index, tokens.labels):
        own = {t: tokens.advantages[t].item() for t in slots}
        document = mean(list(own.values()))
        for t in slots:
            advantage = document if level in ("document", "clipped_document") else own[t]
            weight = 0.0
            if t in kept:
                wide = tokens.logprobs.new_tensor(advantage)
                weight = token_weight(tokens, options, slots, t, wide, level)
            ratio = token_ratio(tokens, slots, t, level, options).item()
            new, old = tokens.logprobs[t].item(), tokens.old_logprobs[t].item()
            clipped = _clipped(config, ratio, (advantage, own[t]), new, old)
            yield _Label(t, ratio, advantage, weight, *clipped)


def _policy(
    config: PolicyGradientLossConfig, tokens: Tokens, columns: dict[str, Any]
) -> dict[str, float]:
    tokens = with_old_policy(tokens, config.model_dump())
    tokens = replace(tokens, advantages=advantages_of(tokens, config.model_dump()))
    assert tokens.old_logprobs is not None
    assert tokens.entropy is not None
    labels = list(_labels(config, tokens))
    old, new, entropy = (
        vector.tolist() for vector in (tokens.old_logprobs, tokens.logprobs, tokens.entropy)
    )
    slots = [label.slot for label in labels]
    found = {
        "logprob": mean([new[t] for t in slots]),
        "old_logprob": mean([old[t] for t in slots]),
        "entropy": mean([entropy[t] for t in slots]),
        "active_fraction": mean([float(x.advantage != 0 and x.weight != 0) for x in labels]),
        "tokens": float(len(slots)),
        "documents": float(len(list(documents(tokens.document_index, tokens.labels)))),
        **_moments("ratio", [label.ratio for label in labels], is_weight=True),
        **_moments("advantage", [label.advantage for label in labels]),
        **_divergences(tokens, old, new, slots),
        **_rewards(tokens, columns),
    }
    if config.type not in UNCLIPPED:
        found["clip_fraction_low"] = mean([float(label.is_low) for label in labels])
        found["clip_fraction_high"] = mean([float(label.is_high) for label in labels])
        found["clip_fraction"] = mean([float(x.is_low or x.is_high) for x in labels])
    entropy_config = config.entropy
    has_top = entropy_config is not None and entropy_config.top_fraction is not None
    given = (config.rollout_correction, config.off_policy_mask, config.max_staleness)
    has_gates = has_top or config.type == "clip_cov" or len(config.corrections) > 0
    if has_gates or any(each is not None for each in given):
        found["weight"] = mean([label.weight for label in labels])
    for number in range(len(config.corrections)):
        factors = [_correction(config, tokens, label, number) for label in labels]
        found[f"correction_{number}"] = mean(factors)
        found[f"correction_{number}_masked"] = mean([float(factor == 0) for factor in factors])
    if entropy_config is not None and entropy_config.bonus > 0:
        found["entropy_bonus_max"] = entropy_config.bonus
    if config.kl is not None and config.kl.adaptive is not None:
        found["kl_coefficient_max"] = config.kl.coefficient
    return found


def _correction(
    config: PolicyGradientLossConfig, tokens: Tokens, label: _Label, number: int
) -> float:
    advantage = tokens.logprobs.new_tensor(label.advantage)
    return correction_weights(tokens, config.model_dump(), label.slot, advantage)[number]


def _log_ratios(config: SquaredLogRatioLossConfig, tokens: Tokens) -> dict[str, float]:
    behaviours = {"old": tokens.old_logprobs, "rollout": tokens.rollout_logprobs}
    behaviour = behaviours[config.behaviour]
    assert behaviour is not None
    found = []
    for slots in documents(tokens.document_index, tokens.labels):
        log_ratios = [(tokens.logprobs[t] - behaviour[t]).item() for t in slots]
        if config.level == "document":
            log_ratios = [math.fsum(log_ratios)] * len(slots)
        found += log_ratios
    return _moments("log_ratio", found)


def _clipped(
    config: Any, ratio: float, advantages: tuple[float, float], new: float, old: float
) -> tuple[bool, bool]:
    """Whether the clip cuts off the label's gradient from below, from above.

    Args:
        config: of the loss.
        ratio: at its level.
        advantages: at its level, and the token's own.
        new: log-probability under the policy.
        old: the same under the old one.
    """
    advantage, own = advantages
    if config.type == "gmpo":
        low = new - old < -config.epsilon_low and own <= 0 and advantage != 0
        return low, new - old > config.epsilon_high and own > 0 and advantage != 0
    if config.type == "cispo":
        low = config.epsilon_low is not None and ratio < 1 - config.epsilon_low
        return low, ratio > 1 + config.epsilon_high
    if config.type == "dppo":
        p, q = math.exp(new), math.exp(old)
        divergence = abs(p - q)
        if config.divergence == "kl":
            rests = [max(-math.expm1(x), 2.0**-126) for x in (new, old)]
            divergence = q * (old - new) + rests[1] * math.log(rests[1] / rests[0])
        low = advantage < 0 and p < q and divergence > config.epsilon_low
        return low, advantage > 0 and p > q and divergence > config.epsilon_high
    if config.type in UNCLIPPED:
        return False, False
    low = advantage < 0 and ratio < 1 - config.epsilon_low
    high = advantage > 0 and ratio > 1 + config.epsilon_high
    if config.delta is not None and advantage < 0:
        high = ratio > config.delta
    return low, high


def _divergences(
    tokens: Tokens, old: list[float], new: list[float], slots: list[int]
) -> dict[str, float]:
    assert tokens.ref_logprobs is not None
    assert tokens.rollout_logprobs is not None
    ref, rollout = tokens.ref_logprobs.tolist(), tokens.rollout_logprobs.tolist()
    found = {}
    pairs = {"kl_old_new": (old, new), "kl_ref": (new, ref), "kl_rollout": (rollout, old)}
    for name, (p, q) in pairs.items():
        differences = [p[t] - q[t] for t in slots]
        bounded = [tokens.logprobs.new_tensor(min(max(d, -BOUND), BOUND)) for d in differences]
        zero = tokens.logprobs.new_zeros(())
        found[name] = mean([kl_estimate(d, zero, "k3").item() for d in bounded])
        found[f"{name}_k1"] = mean(differences)
    weights = [math.exp(min(max(old[t] - rollout[t], -BOUND), BOUND)) for t in slots]
    found |= _moments("rollout_weight", weights, is_weight=True)
    assert tokens.model_version is not None
    staleness = [float(VERSION - int(tokens.model_version[t])) for t in slots]
    found["staleness"] = mean(staleness)
    found["staleness_max"] = max(staleness, default=0.0)
    return found


def _rewards(tokens: Tokens, columns: dict[str, Any]) -> dict[str, float]:
    """Over the documents with labels that have one."""
    some = [int(tokens.document_index[slots[0]])
            for slots in documents(tokens.document_index, tokens.labels)]  # fmt: skip
    rewards = [columns["rewards"][number] for number in some]
    scored = [reward for reward in rewards if not math.isnan(reward)]
    found = _moments("reward", scored)
    return {
        "reward": found["reward"],
        "reward_variance": found["reward_variance"],
        "reward_share": len(scored) / max(len(rewards), 1),
    }


def _pairs(config: DPOLossConfig, tokens: Tokens) -> dict[str, float]:
    assert tokens.ref_logprobs is not None
    assert tokens.advantages is not None
    assert tokens.group_index is not None
    margins: dict[int, float] = {}
    for slots in documents(tokens.document_index, tokens.labels):
        log_ratio = math.fsum(
            tokens.logprobs[t].item() - tokens.ref_logprobs[t].item() for t in slots
        )
        if config.log_ratio == "mean":
            log_ratio /= len(slots)
        sign = 1.0 if tokens.advantages[slots[0]] > 0 else -1.0
        pair = int(tokens.group_index[slots[0]])
        margins[pair] = margins.get(pair, 0.0) + sign * log_ratio
    return {
        "margin": mean([config.beta * margin for margin in margins.values()]),
        "accuracy": mean([float(margin > 0) for margin in margins.values()]),
    }
