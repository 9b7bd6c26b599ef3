"""The definition of the losses: plain loops over documents and tokens.

Of torch and this folder alone. Give it float64 and the tokens of the whole optimizer step: it
counts labels, documents and groups itself. It is never changed to match a fast path; only tests and
benchmarks import it. `LOSSES` names the function of each loss type; `options` are the fields of
its config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.functional.reference.corrections import correction_weight
from fastrl.functional.reference.head import documents

Options = Mapping[str, Any]
# surrogate(ratio, advantage, logprob, old_logprob, options) of one token
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, Options], Tensor]

BOUND = 20.0  # log-ratios saturate here


@dataclass(frozen=True)
class Tokens:
    """The step's tokens in label alignment; every vector is [T], those not needed may be None."""

    labels: Tensor
    document_index: Tensor
    logprobs: Tensor
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    mean_logit: Tensor | None = None
    divergence: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    group_index: Tensor | None = None
    model_version: Tensor | None = None
    draw_weights: Tensor | None = None  # 0 where a label was not drawn; it still counts
    current_version: int = 0
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    distill_weights: Tensor | None = None
    weights: Tensor | None = None


def of_stream(tokens: Tokens, stream: str) -> Tokens:
    """The tokens of a stream: no label where the weight is 0, and the weights of the others."""
    weights = getattr(tokens, f"{stream}_weights")
    labels = tokens.labels.clone()
    for t in range(len(labels)):
        if weights[t] == 0:
            labels[t] = -100
    return replace(tokens, labels=labels, weights=weights)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio that saturates."""
    return torch.exp(torch.clamp(log_ratio, -BOUND, BOUND))


def normalise(values: Mapping[int, Tensor], tokens: Tokens, options: Options) -> Tensor:
    """The loss of values by labelled slot."""
    by_document = list(documents(tokens.document_index, tokens.labels))
    groups: dict[int, list[int]] = {}
    for slots in by_document:
        for t in slots:
            if tokens.group_index is not None:
                groups.setdefault(int(tokens.group_index[t]), []).append(t)
    total = tokens.logprobs.new_zeros(())
    for slots in by_document:
        for t in slots:
            if options["normalisation"] == "tokens":
                divisor = sum(len(other) for other in by_document)
            elif options["normalisation"] == "documents":
                divisor = len(slots) * len(by_document)
            elif options["normalisation"] == "groups":
                assert tokens.group_index is not None
                divisor = len(groups[int(tokens.group_index[t])]) * len(groups)
            else:
                divisor = len(by_document) * options["length"]
            total = total + weight_of(tokens, t) * values[t] / divisor
    return total


def weight_of(tokens: Tokens, t: int) -> float:
    """The weight of what token t adds to a sum: that of its stream, and of its draw."""
    weight = 1.0 if tokens.weights is None else tokens.weights[t].item()
    return weight if tokens.draw_weights is None else weight * tokens.draw_weights[t].item()


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


def token_divergence(
    z: Tensor,  # [V]
    z_teacher: Tensor,  # [V]
    divergence: str,
    beta: float | None,
) -> Tensor:
    """The divergence of one token; M = beta T + (1 - beta) S for `jensen_shannon`."""
    student, teacher = torch.log_softmax(z, 0), torch.log_softmax(z_teacher, 0)

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        total = z.new_zeros(())
        for p, q in zip(log_p, log_q, strict=True):
            if p > -torch.inf:
                total = total + torch.exp(p) * (p - q)
        return total

    if divergence == "forward_kl":
        return kl(teacher, student)
    if divergence == "reverse_kl":
        return kl(student, teacher)
    assert beta is not None
    mixture = torch.log(beta * torch.exp(teacher) + (1 - beta) * torch.exp(student))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def recorded_divergence(
    z: Tensor,  # [V]
    ids: list[int],
    logprobs: list[float],
    divergence: str,
    beta: float | None,
) -> Tensor:
    """The divergence of one token from a teacher of which some ids are recorded.

    All others are one bin of both distributions, if there are any; its probability under the
    teacher is 1e-7 at least.
    """
    log_s = torch.log_softmax(z, 0)
    student, teacher = [log_s[v] for v in ids], [z.new_tensor(value) for value in logprobs]
    others = [log_s[v] for v in range(len(z)) if v not in ids]
    if others:
        student.append(torch.logsumexp(torch.stack(others), 0))
        mass = sum(math.exp(value) for value in logprobs)
        teacher.append(z.new_tensor(math.log(max(1 - mass, 1e-7))))
    total = z.new_zeros(())
    for s, t in zip(student, teacher, strict=True):
        if divergence == "forward_kl":
            total = total + torch.exp(t) * (t - s)
        elif divergence == "reverse_kl":
            total = total + torch.exp(s) * (s - t)
        else:
            assert beta is not None
            m = torch.log(beta * torch.exp(t) + (1 - beta) * torch.exp(s))
            total = total + beta * torch.exp(t) * (t - m) + (1 - beta) * torch.exp(s) * (s - m)
    return total


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
    values = {t: (logprobs[t] - mean_logprob) * (advantages[t] - mean_advantage) for t in slots}
    eligible = sorted((t for t in slots if is_eligible(t, values[t])), key=lambda t: -values[t])
    chosen = eligible[: max(math.floor(options["fraction"] * len(slots)), 1)]
    return {t for t in eligible if values[t] >= values[chosen[-1]]}


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
