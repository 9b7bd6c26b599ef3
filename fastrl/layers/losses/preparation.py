"""How the terms of a policy-gradient loss are prepared from statistics and batch."""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

from torch import Tensor

from fastrl.config.corrections import CorrectionConfig
from fastrl.config.loss_options import RatioLevel
from fastrl.config.policy_losses import PolicyGradientLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, Scope
from fastrl.layers.losses.corrections import Corrections
from fastrl.layers.losses.entropy import EntropyBonus
from fastrl.layers.losses.kl import KLCoefficient, kl_penalty
from fastrl.layers.losses.old_policy import with_old_policy
from fastrl.layers.losses.policy_inputs import PolicyInputs, policy_inputs
from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.layers.losses.ratios import per_document, per_document_mean, ratio_of_level
from fastrl.layers.losses.weights import kept_entropy, token_weights, top_entropy, weights_scope

PolicyGradientConfigT = TypeVar("PolicyGradientConfigT", bound=PolicyGradientLossConfig)


class PolicyPreparation(LanguageModelLoss[PolicyGradientConfigT]):
    """Ratios, advantages, weights, KL and entropy terms, by the config's options."""

    on_policy: bool
    entropy_bonus: EntropyBonus
    kl_coefficient: KLCoefficient

    @property
    def ratio_level(self) -> RatioLevel:
        """The level of the surrogate's ratio."""
        return "token"

    def document_log_ratios(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:  # [T]
        """The token log-ratios that are summed to the document's."""
        return log_ratios

    @cached_property
    def _corrections(self) -> dict[str, CorrectionConfig]:
        """The corrections of the config by option, `rollout_correction` among them."""
        return self.config.all_corrections(has_ratio=self.ratio_level != "none")

    @property
    def scope(self) -> Scope:
        kl, scope = self.config.kl, weights_scope(self.config, self._corrections)
        kl_level = "token" if kl is None else kl.ratio_level
        by_document = self.ratio_level not in ("none", "token") or kl_level != "token"
        return "document" if scope == "token" and by_document else scope

    def prepare(self, statistics: TokenStatistics, batch: BatchKwargs) -> PolicyTerms:
        """The terms of the tokens, with at most one all-reduce of document sums.

        Raises:
            ValueError: the batch lacks a column that the config needs.
        """
        config, level = self.config, self.ratio_level
        batch = self._with_old_policy(statistics, batch)
        inputs = policy_inputs(self, level, config.on_policy_distillation, statistics, batch)
        corrections, advantages = Corrections(self._corrections, inputs), inputs.advantages
        columns = corrections.columns() | self._document_columns(inputs)
        sums = per_document(columns, batch, self.token_groups)
        if level == "document":
            advantages = per_document_mean(sums["advantages"], batch)
        groups = (*self.token_groups, self.data_group)
        factors = corrections.factors(sums, advantages, groups)
        top = top_entropy(config.entropy, inputs, groups)
        return PolicyTerms(
            inputs.mask,
            inputs.logprobs,
            inputs.log_ratios,
            ratio_of_level(level, inputs, sums.get("log_ratios")),
            advantages,
            inputs.advantages,
            token_weights(config.max_staleness, inputs, factors, top),
            kl_penalty(config.kl, inputs, sums.get("kl_log_ratios"), self.kl_coefficient.value),
            kept_entropy(inputs, top) if self.entropy_bonus.can_act else None,
            factors,
            inputs.mask if batch.all_labelled else None,
        )

    def _with_old_policy(self, statistics: TokenStatistics, batch: BatchKwargs) -> BatchKwargs:
        proximal, on_policy = self.config.proximal, self.on_policy
        return with_old_policy(self, proximal, statistics, batch, on_policy=on_policy)

    def _document_columns(self, inputs: PolicyInputs) -> dict[str, Tensor]:
        """The per-token values, [T] each, whose sums over documents ratio and KL need."""
        level, columns = self.ratio_level, dict[str, Tensor]()
        if level not in ("none", "token"):
            columns["log_ratios"] = self.document_log_ratios(inputs.log_ratios, inputs.advantages)
        if level == "document":
            columns["advantages"] = inputs.advantages
        if self.config.kl is not None and self.config.kl.ratio_level != "token":
            columns["kl_log_ratios"] = inputs.log_ratios
        return columns
