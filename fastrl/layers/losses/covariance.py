"""Clip-Cov and KL-Cov: the tokens of largest covariance of log-probability and advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.config.covariance_losses import ClipCovLossConfig, KLCovLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.metrics import deviations, wide
from fastrl.functional.quantiles import largest
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import Scope
from fastrl.layers.losses.clipped import GRPOLoss
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.parallel import sum_over_ranks_


class ClipCovLoss(GRPOLoss):
    """GRPO without the k eligible tokens of largest covariance (`covariances`).

    k = max(floor(fraction N), 1) of the N labels of the micro-batch on all ranks; eligible are
    those that the clip leaves with covariance_low < c_t < covariance_high.

        d loss / d logp = 0 at these tokens, else that of GRPO

    References:
        Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models,
        arXiv:2505.22617, section 4.2. It draws k of the eligible tokens at random; here they are
        the largest, so that neither a seed nor the sharding has a say. With at most k eligible
        tokens both take them all.
    """

    @property
    def scope(self) -> Scope:
        return "batch"

    def prepare(self, statistics: TokenStatistics, batch: BatchKwargs) -> PolicyTerms:
        terms = super().prepare(statistics, batch)
        config = self.config
        assert isinstance(config, ClipCovLossConfig)
        groups = (*self.token_groups, self.data_group)
        low, high = self.is_clipped(terms)
        values, count = covariances(terms, groups)
        inside = (values > config.covariance_low) & (values < config.covariance_high)
        eligible = terms.mask & ~low & ~high & inside
        dropped = largest(values, eligible, chosen_of(count, config.fraction), groups)
        kept = (~dropped).to(terms.advantages.dtype)
        return replace(terms, weights=kept if terms.weights is None else terms.weights * kept)


class KLCovLoss(LanguageModelPolicyGradientLoss[KLCovLossConfig]):
    """-r A, plus coefficient |logp - old| at the k tokens of largest covariance (`covariances`).

    k = max(floor(fraction N), 1) of the N labels of the micro-batch on all ranks, fewer where fewer
    have a covariance above 0.

        d loss / d logp = -r A + coefficient sign(logp - old) at these tokens, -r A elsewhere

    References:
        arXiv:2505.22617, section 4.2; the penalty is that of its code, verl's `kl_cov`. Where
        fewer than k covariances are above 0, as without advantages, verl fills up with others.
    """

    @property
    def scope(self) -> Scope:
        return "batch"

    def surrogate(self, terms: PolicyTerms) -> Tensor:
        groups = (*self.token_groups, self.data_group)
        values, count = covariances(terms, groups)
        number = chosen_of(count, self.config.fraction)
        chosen = largest(values, terms.mask & (values > 0), number, groups)
        penalties = self.config.coefficient * terms.log_ratios.abs()
        return torch.where(chosen, penalties, 0) - terms.ratio * terms.advantages


def covariances(
    terms: PolicyTerms, groups: Sequence[ProcessGroup | None]
) -> tuple[Tensor, Tensor]:  # [T], []
    """c_t = (logp_t - mean logp) (A_t - mean A), detached, and the number of labels.

    Means are over the labels of all ranks of `groups`, in one all-reduce. In float64: those of two
    labels are equal, and so both of the largest or none, which rounding must not decide.
    """
    columns = [wide(x) for x in (terms.logprobs.detach(), terms.token_advantages, terms.mask)]
    sums = torch.stack([each.sum() for each in columns])
    sum_over_ranks_(sums, groups)
    means = sums[:2] / sums[2].clamp(min=1)
    return deviations(columns[0], means[0]) * deviations(columns[1], means[1]), sums[2]


def chosen_of(count: Tensor, fraction: float) -> Tensor:  # []
    """max(floor(fraction count), 1) as an int64."""
    return (fraction * count).floor().clamp(min=1).long()
