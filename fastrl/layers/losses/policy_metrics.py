"""Metrics of the policy-gradient losses."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.functional.metrics import wide_dtype
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.column_metrics import divergences, rewards, staleness
from fastrl.layers.losses.entropy import EntropyBonus
from fastrl.layers.losses.kl import KLCoefficient
from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.layers.losses.ratios import bounded_exp
from fastrl.layers.losses.reduction import document_total, token_metrics


def policy_metrics(
    terms: PolicyTerms,
    statistics: TokenStatistics,
    batch: BatchKwargs,
    value: Tensor,
    *,
    clipped: tuple[Tensor, Tensor] | None,  # [T], [T]
    bonus: EntropyBonus,
    kl: KLCoefficient,
) -> dict[str, Tensor]:
    """This part's share of the step's metrics; means are over its labels unless stated otherwise.

    Always: `loss`, `logprob`, `tokens`, `documents` (counts), `active_fraction` (tokens with weight
    and advantage), `advantage` with its moments, `ratio` with its moments (at the loss's level).
    With the columns in the batch: `old_logprob`; `kl_old_new` and `kl_old_new_k1`, of KL(old, new);
    `kl_ref` and `kl_ref_k1`, of KL(new, reference); `kl_rollout` and `kl_rollout_k1`, of
    KL(sampler, old); `rollout_weight` = old / sampler with its moments; `staleness` and
    `staleness_max`; `reward` with its square, over the documents that have one. Those without
    `_k1` are k3 estimates. With a clip: `clip_fraction`, `_low`, `_high`. `weight`, the product of
    all weights and masks, where there are any; of entry i of `corrections` `correction_i`, its mean
    factor, and `correction_i_masked`, the share that it drops; `entropy`, `entropy_bonus_max`
    likewise, and `kl_coefficient_max` where it adapts.
    """
    masks, columns = _shares(terms, clipped), divergences(terms, statistics, batch)
    columns["logprob"] = statistics.logprobs
    if statistics.entropy is not None:
        columns["entropy"] = statistics.entropy
    if terms.weights is not None:
        columns["weight"] = terms.weights
    columns |= {f"correction_{n}": factor for n, factor in _numbered(terms)}
    moments = {"ratio": terms.ratio, "advantage": terms.advantages}
    if "kl_rollout_k1" in columns:
        moments["rollout_weight"] = bounded_exp(-columns["kl_rollout_k1"])
    moments |= staleness(batch)
    metrics = {"loss": value.detach(), **token_metrics(masks | columns, moments, batch)}
    for unused in ("staleness_squared", "staleness_min"):
        metrics.pop(unused, None)
    metrics |= rewards(batch)
    if bonus.can_act:
        metrics["entropy_bonus_max"] = torch.full_like(metrics["loss"], bonus.value)
    if kl.adaptive is not None:
        metrics["kl_coefficient_max"] = torch.full_like(metrics["loss"], kl.value)
    is_label = terms.mask.to(statistics.logprobs.dtype)
    metrics["tokens"] = is_label.sum(dtype=wide_dtype(is_label.device))
    metrics["documents"] = document_total(is_label, batch)
    return metrics


def _shares(
    terms: PolicyTerms,
    clipped: tuple[Tensor, Tensor] | None,  # [T], [T]
) -> dict[str, Tensor]:  # [T] each
    """What is true of a token or not, by the name of the share of tokens."""
    active = terms.mask & (terms.advantages != 0)
    if terms.weights is not None:
        active = active & (terms.weights != 0)
    masks = {"active_fraction": active}
    masks |= {f"correction_{n}_masked": factor == 0 for n, factor in _numbered(terms)}
    if clipped is not None:
        low, high = clipped
        masks |= {"clip_fraction_low": low, "clip_fraction_high": high, "clip_fraction": low | high}
    return masks


def _numbered(terms: PolicyTerms) -> list[tuple[str, Tensor]]:
    """The factors [T] of the entries of `corrections`, by their number."""
    found = [(option.partition(".")[2], factor) for option, factor in terms.corrections.items()]
    return [(number, factor) for number, factor in found if number]
