"""The definition of the losses: plain loops over documents and tokens.

Of torch and this folder alone. Give it float64 and the tokens of the whole optimizer step: it
counts labels, documents and groups itself. It is never changed to match a fast path; only tests and
benchmarks import it. `LOSSES` names the function of each loss type; `options` are the fields of
its config.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.functional.reference.head import documents
from fastrl.functional.reference.policy_gradient import (
    advantages_of,
    policy_gradient,
    with_old_policy,
)
from fastrl.functional.reference.tokens import Options, Tokens, bounded_exp, normalise, weight_of


def cross_entropy(tokens: Tokens, options: Options) -> Tensor:
    """-(1 - a) logp + a (lse - mean z), a the label smoothing."""
    smoothing = options["label_smoothing"]
    values = {}
    for slots in documents(tokens.document_index, tokens.labels):
        for t in slots:
            values[t] = -(1 - smoothing) * tokens.logprobs[t]
            if smoothing > 0:
                assert tokens.logsumexp is not None
                assert tokens.mean_logit is not None
                values[t] = values[t] + smoothing * (tokens.logsumexp[t] - tokens.mean_logit[t])
    return normalise(values, tokens, options)


def z_loss(tokens: Tokens, options: Options) -> Tensor:
    """lse^2."""
    assert tokens.logsumexp is not None
    values = {
        t: tokens.logsumexp[t] ** 2
        for slots in documents(tokens.document_index, tokens.labels)
        for t in slots
    }
    return normalise(values, tokens, options)


def squared_log_ratio(tokens: Tokens, options: Options) -> Tensor:
    """The square of the token's log-ratio to the behaviour policy, or of its document's sum."""
    behaviours = {"old": tokens.old_logprobs, "rollout": tokens.rollout_logprobs}
    behaviour = behaviours[options["behaviour"]]
    assert behaviour is not None
    values = {}
    for slots in documents(tokens.document_index, tokens.labels):
        log_ratios = {t: tokens.logprobs[t] - behaviour[t] for t in slots}
        for t in slots:
            log_ratio = log_ratios[t]
            if options["level"] == "document":
                log_ratio = torch.stack(list(log_ratios.values())).sum()
            values[t] = log_ratio * log_ratio
    return normalise(values, tokens, options)


def positive_nll(tokens: Tokens, options: Options) -> Tensor:
    """The mean of -logp over the labels with an advantage above 0."""
    assert tokens.advantages is not None
    total = tokens.logprobs.new_zeros(())
    count = 0
    for slots in documents(tokens.document_index, tokens.labels):
        for t in slots:
            if tokens.advantages[t] > 0:
                total = total - weight_of(tokens, t) * tokens.logprobs[t]
                count += 1
    return total / max(count, 1)


def distillation(tokens: Tokens, options: Options) -> Tensor:
    """The divergence."""
    assert tokens.divergence is not None
    values = {
        t: tokens.divergence[t]
        for slots in documents(tokens.document_index, tokens.labels)
        for t in slots
    }
    return normalise(values, tokens, options)


def dpo(tokens: Tokens, options: Options) -> Tensor:
    """f(margin) of each pair, mean over pairs."""
    assert tokens.ref_logprobs is not None
    assert tokens.advantages is not None
    assert tokens.group_index is not None
    margins: dict[int, Tensor] = {}
    for slots in documents(tokens.document_index, tokens.labels):
        document = tokens.logprobs.new_zeros(())
        for t in slots:
            document = document + tokens.logprobs[t] - tokens.ref_logprobs[t]
        if options["log_ratio"] == "mean":
            document = document / len(slots)
        pair = int(tokens.group_index[slots[0]])
        sign = 1.0 if tokens.advantages[slots[0]] > 0 else -1.0
        margins[pair] = margins.get(pair, tokens.logprobs.new_zeros(())) + sign * document
    total = tokens.logprobs.new_zeros(())
    beta = options["beta"]
    for margin in margins.values():
        if options["variant"] == "sigmoid":
            value = torch.log(1 + torch.exp(-beta * margin))
        elif options["variant"] == "ipo":
            value = (margin - 1 / (2 * beta)) ** 2
        else:
            value = torch.clamp(1 - beta * margin, min=0)
        total = total + value / len(margins)
    return total


def clipped(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, options: Options) -> Tensor:
    """-min(r A, clip(r) A); where A < 0 not above -delta A."""
    clip = torch.clamp(ratio, 1 - options["epsilon_low"], 1 + options["epsilon_high"])
    loss = -torch.minimum(ratio * a, clip * a)
    if options["delta"] is not None and a < 0:
        loss = torch.minimum(loss, -options["delta"] * a)
    return loss


def cispo(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, options: Options) -> Tensor:
    """-detach(clip(r)) A logp."""
    low = 0.0 if options["epsilon_low"] is None else 1 - options["epsilon_low"]
    return -torch.clamp(ratio, low, 1 + options["epsilon_high"]).detach() * a * logprob


def sapo(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, options: Options) -> Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1))."""
    tau = options["tau_positive"] if a > 0 else options["tau_negative"]
    gate: Tensor = 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    return -a * gate


def gmpo(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, options: Options) -> Tensor:
    """-A r, r the geometric mean of the clipped ratios."""
    return -a * ratio


def vespo(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, options: Options) -> Tensor:
    """-detach(W^k exp(lambda (1 - W))) A logp."""
    sign = "positive" if a >= 0 else "negative"
    w = ratio.detach()
    phi: Tensor = w ** options[f"power_{sign}"] * torch.exp(options[f"rate_{sign}"] * (1 - w))
    return -phi * a * logprob


def dppo(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, options: Options) -> Tensor:
    """-M detach(min(r, max_ratio)) A logp."""
    p, q = math.exp(logprob.item()), math.exp(old.item())
    divergence = abs(p - q)
    if options["divergence"] == "kl":
        # Of a certain label 1 - p is 0 and the divergence infinite: bounded, as the loss says.
        rest_p = max(-math.expm1(logprob.item()), 2.0**-126)
        rest_q = max(-math.expm1(old.item()), 2.0**-126)
        divergence = q * (old - logprob).item() + rest_q * math.log(rest_q / rest_p)
    if a > 0 and p > q and divergence > options["epsilon_high"]:
        return torch.zeros_like(logprob)
    if a <= 0 and p < q and divergence > options["epsilon_low"]:
        return torch.zeros_like(logprob)
    limit = math.inf if options["max_ratio"] is None else options["max_ratio"]
    return -torch.clamp(ratio, max=limit).detach() * a * logprob


def reinforce(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, options: Options) -> Tensor:
    """-A logp."""
    return -a * logprob


def clip_cov(tokens: Tokens, options: Options) -> Tensor:
    """GRPO without the eligible tokens of largest covariance."""
    dropped = covariances_to_drop(tokens, options)
    return policy_gradient(
        tokens, options, clipped, "token", dropped, lambda ratio, *_: torch.zeros_like(ratio)
    )


def covariances_to_drop(tokens: Tokens, options: Options) -> set[int]:
    """The tokens of largest covariance of those within its bounds that the clip leaves."""
    tokens = with_old_policy(tokens, options)
    advantages = advantages_of(tokens, options)

    def is_eligible(t: int, covariance: float) -> bool:
        assert tokens.old_logprobs is not None
        if not options["covariance_low"] < covariance < options["covariance_high"]:
            return False
        ratio = bounded_exp(tokens.logprobs[t] - tokens.old_logprobs[t])
        if advantages[t] > 0:
            return bool(ratio <= 1 + options["epsilon_high"])
        if advantages[t] < 0:
            limit = math.inf if options["delta"] is None else options["delta"]
            return bool(1 - options["epsilon_low"] <= ratio <= limit)
        return True

    return largest_covariances(tokens, options, is_eligible)


def kl_cov(tokens: Tokens, options: Options) -> Tensor:
    """-r A, plus coefficient |logp - old| at the tokens of largest covariance."""

    def unclipped(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, _: Options) -> Tensor:
        return -ratio * a

    def penalised(ratio: Tensor, a: Tensor, logprob: Tensor, old: Tensor, _: Options) -> Tensor:
        penalty: Tensor = options["coefficient"] * (logprob - old).abs()
        return penalty - ratio * a

    chosen = largest_covariances(tokens, options, lambda t, covariance: covariance > 0)
    return policy_gradient(tokens, options, unclipped, "token", chosen, penalised)


def largest_covariances(
    tokens: Tokens, options: Options, is_eligible: Callable[[int, float], bool]
) -> set[int]:
    """The max(floor(fraction N), 1) eligible of N labels with the largest covariance.

    And those with as large a one as the last of them.
    """
    slots = [t for some in documents(tokens.document_index, tokens.labels) for t in some]
    logprobs = {t: tokens.logprobs[t].item() for t in slots}
    of_all = advantages_of(tokens, options)
    advantages = {t: of_all[t].item() for t in slots}
    mean_logprob = math.fsum(logprobs.values()) / max(len(slots), 1)
    mean_advantage = math.fsum(advantages.values()) / max(len(slots), 1)
    values = {
        t: deviation(logprobs[t], mean_logprob) * deviation(advantages[t], mean_advantage)
        for t in slots
    }
    eligible = sorted((t for t in slots if is_eligible(t, values[t])), key=lambda t: -values[t])
    chosen = eligible[: max(math.floor(options["fraction"] * len(slots)), 1)]
    return {t for t in eligible if values[t] >= values[chosen[-1]]}


def deviation(value: float, mean: float) -> float:
    """From the mean; 0 where it is the rounding of the mean of equal values."""
    return 0.0 if abs(value - mean) <= 1e-12 * abs(mean) else value - mean


LOSSES: dict[str, Callable[[Tokens, Options], Tensor]] = {
    "cross_entropy": cross_entropy,
    "z_loss": z_loss,
    "squared_log_ratio": squared_log_ratio,
    "positive_nll": positive_nll,
    "dpo": dpo,
    "distillation": distillation,
    "grpo": lambda tokens, options: policy_gradient(tokens, options, clipped, "token"),
    "gspo": lambda tokens, options: policy_gradient(tokens, options, clipped, "document"),
    "gspo_token": lambda tokens, options: policy_gradient(
        tokens, options, clipped, "document_token"
    ),
    "luspo": lambda tokens, options: policy_gradient(tokens, options, clipped, "document"),
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "cispo": lambda tokens, options: policy_gradient(
        tokens, options, cispo, options["ratio_level"]
    ),
    "sapo": lambda tokens, options: policy_gradient(tokens, options, sapo, options["ratio_level"]),
    "gmpo": lambda tokens, options: policy_gradient(tokens, options, gmpo, "clipped_document"),
    "vespo": lambda tokens, options: policy_gradient(tokens, options, vespo, "document_product"),
    "dppo": lambda tokens, options: policy_gradient(tokens, options, dppo, "token"),
    "reinforce": lambda tokens, options: policy_gradient(tokens, options, reinforce, "none"),
}
