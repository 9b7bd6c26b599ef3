"""Metrics of the batch's columns: divergences of policies, staleness, rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.functional.kl import kl_estimate
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import masked
from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.layers.losses.reduction import document_mean, moments


def divergences(
    terms: PolicyTerms, statistics: TokenStatistics, batch: BatchKwargs
) -> dict[str, Tensor]:
    """Estimates of the KL divergences between the policies of the batch."""
    columns: dict[str, Tensor] = {}
    if batch.old_logprobs is not None:
        columns["old_logprob"] = batch.old_logprobs
        differences = masked(batch.old_logprobs - statistics.logprobs, terms.mask)
        columns["kl_old_new"] = kl_estimate(differences, "k3")
        columns["kl_old_new_k1"] = differences
    if batch.ref_logprobs is not None:
        differences = masked(statistics.logprobs - batch.ref_logprobs, terms.mask)
        columns["kl_ref"] = kl_estimate(differences, "k3")
        columns["kl_ref_k1"] = differences
    if batch.old_logprobs is not None and batch.rollout_logprobs is not None:
        differences = masked(batch.rollout_logprobs - batch.old_logprobs, terms.mask)
        columns["kl_rollout"] = kl_estimate(differences, "k3")
        columns["kl_rollout_k1"] = differences
    return columns


def staleness(batch: BatchKwargs) -> dict[str, Tensor]:
    """Versions between the current weights and those that sampled a token's document."""
    if batch.current_version is None or batch.model_version is None:
        return {}
    found = moments("staleness", batch.current_version - batch.model_version, batch)
    return {name: found[name] for name in ("staleness", "staleness_max")}


def rewards(batch: BatchKwargs) -> dict[str, Tensor]:
    """Moments over the documents with labels that have a reward, and their share."""
    if batch.rewards is None:
        return {}
    values = torch.cat([batch.rewards, batch.rewards.new_full((1,), torch.nan)])
    values = values[batch.document_index]
    scored = ~values.isnan()
    values = masked(values, scored)
    return {
        "reward": document_mean(values, batch),
        "reward_squared": document_mean(values.double().square(), batch),
        "reward_share": document_mean(scored.to(values.dtype), batch),
    }
