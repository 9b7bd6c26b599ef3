"""The definition of what the policy-gradient losses share: ratios, weights, KL and entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from fastrl.functional.reference.corrections import correction_weight
from fastrl.functional.reference.head import documents
from fastrl.functional.reference.tokens import (
    BOUND,
    Options,
    Tokens,
    bounded_exp,
    normalise,
    weight_of,
)

# surrogate(ratio, advantage, logprob, old_logprob, options) of one token
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, Options], Tensor]


def policy_gradient(
    tokens: Tokens,
    options: Options,
    surrogate: Surrogate,
    level: str,
    others: Collection[int] = (),
    surrogate_of_others: Surrogate | None = None,
) -> Tensor:
    """A policy-gradient loss with its options: weights, KL and entropy terms.

    level: `token`, `document` (geometric mean of ratios, mean advantage), `document_token` (its
    value, the gradient of the token's ratio), `document_product`, `clipped_document` (GMPO).
    others: slots with a surrogate of their own.
    """
    tokens = with_old_policy(tokens, options)
    tokens = replace(tokens, advantages=advantages_of(tokens, options))
    assert tokens.advantages is not None
    top = top_entropy_slots(tokens, options)
    values: dict[int, Tensor] = {}
    bonus = tokens.logprobs.new_zeros(())
    num_labels = 0
    for slots in documents(tokens.document_index, tokens.labels):
        num_labels += len(slots)
        advantage = torch.stack([tokens.advantages[t] for t in slots]).mean()
        for t in slots:
            a = advantage if level in ("document", "clipped_document") else tokens.advantages[t]
            weight = token_weight(tokens, options, slots, t, a, level) if t in top else 0.0
            values[t] = tokens.logprobs.new_zeros(())
            if weight != 0:
                ratio = token_ratio(tokens, slots, t, level, options)
                old = tokens.logprobs if tokens.old_logprobs is None else tokens.old_logprobs
                function = surrogate_of_others if t in others else surrogate
                assert function is not None
                values[t] = weight * function(ratio, a, tokens.logprobs[t], old[t], options)
            if options["kl"] is not None:
                values[t] = values[t] + kl(tokens, options["kl"], slots, t)
            if t in top and tokens.entropy is not None:
                bonus = bonus + weight_of(tokens, t) * tokens.entropy[t]
    loss = normalise(values, tokens, options)
    if options["entropy"] is not None and options["entropy"]["bonus"]:
        loss = loss - options["entropy"]["bonus"] * bonus / num_labels
    return loss


def with_old_policy(tokens: Tokens, options: Options) -> Tokens:
    """The tokens with the log-probabilities that ratios are taken to."""
    if options["on_policy"]:
        return replace(tokens, old_logprobs=tokens.logprobs.detach())
    proximal = options["proximal"]
    if proximal is None:
        return tokens
    assert tokens.rollout_logprobs is not None
    old = []
    for t, sampler in enumerate(tokens.rollout_logprobs):
        share = proximal["weight"]
        if share is None:
            assert tokens.model_version is not None
            versions = tokens.current_version - int(tokens.model_version[t])
            share = 0.0 if versions <= 1 else (versions - 1) / versions
        old.append((1 - share) * sampler + share * tokens.logprobs[t].detach())
    return replace(tokens, old_logprobs=torch.stack(old))


def advantages_of(tokens: Tokens, options: Options) -> Tensor:
    """A, or A + c (ref - logp), or c (ref - logp) alone, as constants."""
    config = options["on_policy_distillation"]
    if config is None:
        assert tokens.advantages is not None
        return tokens.advantages
    assert tokens.ref_logprobs is not None
    result = torch.zeros_like(tokens.ref_logprobs)
    bound = math.inf if config["bound"] is None else config["bound"]
    for slots in documents(tokens.document_index, tokens.labels):
        for t in slots:
            difference = (tokens.ref_logprobs[t] - tokens.logprobs[t]).item()
            result[t] = config["coefficient"] * min(max(difference, -bound), bound)
            if config["rewards"]:
                assert tokens.advantages is not None
                result[t] = result[t] + tokens.advantages[t]
    return result


def token_ratio(tokens: Tokens, slots: list[int], t: int, level: str, options: Options) -> Tensor:
    """The ratio of token t of a document at a level."""
    if level == "none":
        return torch.ones_like(tokens.logprobs[t])
    assert tokens.old_logprobs is not None
    log_ratios = [tokens.logprobs[s] - tokens.old_logprobs[s] for s in slots]
    if level == "token":
        return bounded_exp(tokens.logprobs[t] - tokens.old_logprobs[t])
    if level == "document_product":
        return bounded_exp(torch.stack(log_ratios).sum())
    if level == "clipped_document":
        assert tokens.advantages is not None
        log_ratios = [
            torch.clamp(log_ratio, max=options["epsilon_high"])
            if tokens.advantages[s] > 0
            else torch.clamp(log_ratio, min=-options["epsilon_low"])
            for s, log_ratio in zip(slots, log_ratios, strict=True)
        ]
    mean = torch.stack(log_ratios).mean()
    if level == "document_token":
        return bounded_exp(mean.detach() + tokens.logprobs[t] - tokens.logprobs[t].detach())
    return bounded_exp(mean)


def token_weight(
    tokens: Tokens, options: Options, slots: list[int], t: int, advantage: Tensor, level: str
) -> float:
    """The product of the weights and masks of token t."""
    weight = 1.0
    correction = options["rollout_correction"]
    if correction is not None:
        assert tokens.rollout_logprobs is not None
        policy = tokens.logprobs if level == "none" else tokens.old_logprobs
        assert policy is not None
        logs = {s: (policy[s] - tokens.rollout_logprobs[s]).item() for s in slots}
        log_weight = logs[t]
        if correction["level"] == "document":
            log_weight = sum(logs.values())
            if correction["mean"] == "geometric":
                log_weight /= len(slots)
        weight = math.exp(min(max(log_weight, -BOUND), BOUND))
        low = 0.0 if correction["low"] is None else correction["low"]
        high = math.inf if correction["high"] is None else correction["high"]
        if correction["mode"] == "truncate":
            weight = min(max(weight, low), high)
        elif not low <= weight <= high:
            weight = 0.0
    mask = options["off_policy_mask"]
    if mask is not None:
        behaviour = tokens.old_logprobs if mask["behaviour"] == "old" else tokens.rollout_logprobs
        assert behaviour is not None
        drift = sum((behaviour[s] - tokens.logprobs[s]).item() for s in slots) / len(slots)
        if advantage < 0 and drift > mask["threshold"]:
            weight = 0.0
    for factor in correction_weights(tokens, options, t, advantage):
        weight = weight * factor
    if options["max_staleness"] is not None:
        assert tokens.model_version is not None
        if tokens.current_version - int(tokens.model_version[t]) > options["max_staleness"]:
            weight = 0.0
    return weight


def correction_weights(tokens: Tokens, options: Options, t: int, advantage: Tensor) -> list[float]:
    """The factor of each of the corrections of token t."""
    if not options["corrections"]:
        return []
    by_document = list(documents(tokens.document_index, tokens.labels))
    columns = {"current": tokens.logprobs, "old": tokens.old_logprobs}
    columns["rollout"] = tokens.rollout_logprobs
    policies = {name: x.tolist() for name, x in columns.items() if x is not None}
    return [
        correction_weight(
            entry,
            policies[entry["policy"]],
            policies[entry["behaviour"]],
            by_document,
            t,
            advantage.item(),
        )
        for entry in options["corrections"]
    ]


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, estimator: str) -> Tensor:
    """Schulman's estimators of KL(policy, reference) from one token of the policy, d = logp - ref.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
    """
    difference = logprob - ref_logprob
    estimators: dict[str, Callable[[], Tensor]] = {
        "k1": lambda: difference,
        "k2": lambda: difference.square() / 2,
        "k3": lambda: torch.exp(-difference) - 1 + difference,
    }
    return estimators[estimator]()


def kl(tokens: Tokens, options: Options, slots: list[int], t: int) -> Tensor:
    """coefficient * KL of token t."""
    assert tokens.ref_logprobs is not None
    reference = tokens.ref_logprobs[t]
    if options["estimator"] == "k3":
        # d saturates, as in the exponential.
        difference = torch.clamp(tokens.logprobs[t] - reference, -BOUND, BOUND)
        value = kl_estimate(difference, torch.zeros_like(difference), "k3")
    else:
        value = kl_estimate(tokens.logprobs[t], reference, options["estimator"])
    if options["clamp"] is not None and abs(value.item()) > options["clamp"]:
        value = torch.full_like(value, math.copysign(options["clamp"], value.item()))
    if options["gradient"] == "ratio":
        value = value * token_ratio(tokens, slots, t, options["ratio_level"], {})
    elif options["gradient"] == "straight_through":
        k2 = kl_estimate(tokens.logprobs[t], reference, "k2")
        value = value.detach() + k2 - k2.detach()
    coefficient: float = options["coefficient"]
    return coefficient * value


def top_entropy_slots(tokens: Tokens, options: Options) -> set[int]:
    """Labelled slots whose entropy is at least the (1 - top_fraction) quantile."""
    slots = [t for some in documents(tokens.document_index, tokens.labels) for t in some]
    if options["entropy"] is None or options["entropy"]["top_fraction"] is None or not slots:
        return set(slots)
    assert tokens.entropy is not None
    entropy = tokens.entropy.detach()
    ordered = sorted(entropy[t].item() for t in slots)
    position = (1 - options["entropy"]["top_fraction"]) * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    quantile = ordered[below] + (position - below) * (ordered[above] - ordered[below])
    return {t for t in slots if entropy[t].item() >= quantile}
