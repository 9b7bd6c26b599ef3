"""Metrics of the batch's columns: divergences of policies, staleness, rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.functional.kl import kl_estimate
from fastrl.functional.metrics import wide
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.masks import masked
from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.layers.losses.reduction import document_mean


def divergences(
    terms: PolicyTerms, statistics: TokenStatistics, batch: BatchKwargs
) -> dict[str, Tensor]:
    """Estimates of the KL divergences between the policies of the batch."""
    columns: dict[str, Tensor] = {}
    differences: dict[str, Tensor] = {}
    new, old = statistics.logprobs, batch.old_logprobs
    if old is not None:
        columns["old_logprob"] = old
        differences["kl_old_new"] = old - new
    if batch.ref_logprobs is not None:
        differences["kl_ref"] = new - batch.ref_logprobs
    if old is not None and batch.rollout_logprobs is not None:
        differences["kl_rollout"] = batch.rollout_logprobs - old
    if differences:
        k1 = masked(torch.stack(list(differences.values())), terms.mask)  # [K, T]
        columns |= zip(differences, kl_estimate(k1, "k3"), strict=True)
        columns |= zip([f"{name}_k1" for name in differences], k1, strict=True)
    return columns


def staleness(batch: BatchKwargs) -> dict[str, Tensor]:
    """Versions between the current weights and those that sampled a token's document, [T]."""
    if batch.current_version is None or batch.model_version is None:
        return {}
    return {"staleness": batch.current_version - batch.model_version}


def rewards(batch: BatchKwargs) -> dict[str, Tensor]:
    """Moments over the documents with labels that have a reward, and their share."""
    if batch.rewards is None:
        return {}
    values = torch.cat([batch.rewards, batch.rewards.new_full((1,), torch.nan)])
    values = values[batch.document_index]
    scored = ~values.isnan()
    values = masked(values, scored)
    mean, share = document_mean(torch.stack([values, scored.to(values.dtype)]), batch)
    squared = document_mean(wide(values).square(), batch)
    return {"reward": mean, "reward_squared": squared, "reward_share": share}
