"""Metrics of the policy-gradient losses."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import masked
from fastrl.layers.losses.column_metrics import divergences, rewards, staleness
from fastrl.layers.losses.entropy import EntropyBonus
from fastrl.layers.losses.kl import KLCoefficient
from fastrl.layers.losses.normalisation import draw_weighted
from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.layers.losses.ratios import bounded_exp
from fastrl.layers.losses.reduction import moments, token_means


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
    columns: dict[str, Tensor] = {"logprob": statistics.logprobs}
    columns["active_fraction"] = _active(terms).to(torch.float32)
    if terms.weights is not None:
        columns["weight"] = terms.weights
    for option, factor in terms.corrections.items():
        _, _, number = option.partition(".")
        if number:
            columns[f"correction_{number}"] = factor
            columns[f"correction_{number}_masked"] = (factor == 0).to(torch.float32)
    if statistics.entropy is not None:
        columns["entropy"] = statistics.entropy
    if clipped is not None:
        low, high = clipped
        columns["clip_fraction_low"] = low.to(torch.float32)
        columns["clip_fraction_high"] = high.to(torch.float32)
        columns["clip_fraction"] = (low | high).to(torch.float32)
    columns |= divergences(terms, statistics, batch)
    metrics = {"loss": value.detach()}
    metrics |= token_means(columns, batch)
    metrics |= moments("ratio", terms.ratio, batch) | moments("advantage", terms.advantages, batch)
    if batch.old_logprobs is not None and batch.rollout_logprobs is not None:
        log_weights = masked(batch.old_logprobs - batch.rollout_logprobs, terms.mask)
        metrics |= moments("rollout_weight", bounded_exp(log_weights), batch)
    metrics |= staleness(batch) | rewards(batch)
    if bonus.can_act:
        metrics["entropy_bonus_max"] = torch.full_like(metrics["loss"], bonus.value)
    if kl.adaptive is not None:
        metrics["kl_coefficient_max"] = torch.full_like(metrics["loss"], kl.value)
    ones = torch.ones_like(statistics.logprobs)
    metrics["tokens"] = masked(ones, terms.mask).double().sum()
    shares = masked(ones, terms.mask) / batch.label_counts.clamp(min=1)
    metrics["documents"] = draw_weighted(shares.double(), batch).sum()
    return metrics


def _active(terms: PolicyTerms) -> Tensor:
    active = terms.mask & (terms.advantages != 0)
    return active if terms.weights is None else active & (terms.weights != 0)
