"""The base of the policy-gradient losses: ratios, advantages, weights, KL and entropy terms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.config.loss_options import RatioLevel
from fastrl.config.policy_losses import PolicyGradientLossConfig
from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.functional.quantiles import top_fraction
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, Scope, at_least_one, masked, required
from fastrl.layers.losses.entropy import EntropyBonus
from fastrl.layers.losses.kl import kl_term
from fastrl.layers.losses.policy_metrics import policy_metrics
from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.layers.losses.ratios import (
    bounded_exp,
    logprob_minus_detached,
    per_document,
    per_document_mean,
)
from fastrl.layers.losses.weights import off_policy_mask, rollout_weights, staleness_mask

PolicyGradientConfigT = TypeVar("PolicyGradientConfigT", bound=PolicyGradientLossConfig)


class LanguageModelPolicyGradientLoss(LanguageModelLoss[PolicyGradientConfigT]):
    """The loss around a surrogate, by the config's options; a subclass defines the surrogate.

        loss = normalise(weights * surrogate(ratio, A) + kl) - bonus * mean(entropy)

    The ratio is, by `ratio_level`, with l_t = logp_t - old_t and n_d labels in document d:
        token             r_t = exp(l_t)
        document          s_d = exp((1 / n_d) sum_t l_t), and the document's mean advantage
        document_token    the value of s_d with the gradient of r_t / detach(r_t)
        document_product  W_d = exp(sum_t l_t)
        none              1; `old_logprobs` are not needed
    Sums over a document include the tokens of all ranks. Exponents saturate at `LOG_RATIO_BOUND`.

    Attributes:
        on_policy: whether the old policy is the policy itself, old = detach(logp) of the same call,
            so that l_t is 0 with gradient 1; also in `rollout_correction` (old - sampler), in
            `off_policy_mask` (old - new) and in the metrics. `old_logprobs` of the batch are not
            read then. It begins as the config says and may change between calls: a trainer whose
            first update follows the sampling needs no earlier pass for it.
        entropy_bonus: the factor of the bonus and its controller.
    """

    def __init__(
        self,
        config: PolicyGradientConfigT,
        token_groups: Sequence[ProcessGroup | None] = (),
        data_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(config, token_groups, data_group)
        self.on_policy = config.on_policy
        self.entropy_bonus = EntropyBonus(config.entropy)

    @property
    def ratio_level(self) -> RatioLevel:
        """The level of the surrogate's ratio."""
        return "token"

    @abstractmethod
    def surrogate(self, terms: PolicyTerms) -> Tensor:  # [T]
        """The loss of each token (or of its document) from ratio, advantage and logprob."""

    def document_log_ratios(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:  # [T]
        """The token log-ratios that are summed to the document's."""
        return log_ratios

    def is_clipped(self, terms: PolicyTerms) -> tuple[Tensor, Tensor] | None:  # [T], [T]
        """Whether a token's gradient is cut off below, above its bound; None without a clip."""
        return None

    @property
    def scope(self) -> Scope:
        config = self.config
        if config.entropy is not None and config.entropy.top_fraction is not None:
            return "batch"
        rollout, kl = config.rollout_correction, config.kl
        by_document = (
            self.ratio_level not in ("none", "token")
            or (rollout is not None and rollout.level == "document")
            or (kl is not None and kl.ratio_level != "token")
            or config.off_policy_mask is not None
        )
        return "document" if by_document else "token"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.config.entropy is None else frozenset({"entropy"})

    def gradient_rows(self, batch: BatchKwargs) -> RowSet:
        """Rows with a non-zero advantage, or whose document has one; with a penalty all labels."""
        rows = batch.active_document_rows if self.scope == "document" else batch.active_rows
        has_penalty = self.config.kl is not None or self.entropy_bonus.can_act
        if rows is None or has_penalty or self.scope == "batch":
            return batch.rows_with_labels
        return rows

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        return self.value(self.prepare(statistics, batch), batch)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """See `policy_metrics`."""
        terms = self.prepare(statistics, batch)
        return self._metrics(terms, statistics, batch, self.value(terms, batch))

    def with_metrics(
        self, statistics: TokenStatistics, batch: BatchKwargs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its metrics from the same terms: one all-reduce."""
        terms = self.prepare(statistics, batch)
        value = self.value(terms, batch)
        with torch.no_grad():
            statistics, terms = statistics.map(Tensor.detach), terms.detached()
            return value, self._metrics(terms, statistics, batch, value.detach())

    def _metrics(
        self, terms: PolicyTerms, statistics: TokenStatistics, batch: BatchKwargs, value: Tensor
    ) -> dict[str, Tensor]:
        bonus = self.entropy_bonus
        return policy_metrics(
            terms,
            statistics,
            self._with_old_policy(statistics, batch),
            value,
            clipped=self.is_clipped(terms),
            entropy_bonus=bonus.value if bonus.can_act else None,
        )

    def value(self, terms: PolicyTerms, batch: BatchKwargs) -> Tensor:
        """The loss of prepared terms, a scalar."""
        values = self.surrogate(terms)
        mask = terms.mask
        if terms.weights is not None:
            mask = mask & (terms.weights != 0)
            values = values * terms.weights
        # Selected, not multiplied by 0: a dropped token may have any value.
        values = masked(values, mask)
        if terms.kl is not None:
            values = values + terms.kl
        loss = self.normalise(values, batch)
        if terms.kept_entropy is not None:
            mean = terms.kept_entropy.sum() / at_least_one(batch.num_labels_in_batch)
            loss = loss - self.entropy_bonus.value * mean
        return loss

    def prepare(self, statistics: TokenStatistics, batch: BatchKwargs) -> PolicyTerms:
        """The terms of the tokens, with at most one all-reduce of document sums.

        Raises:
            ValueError: the batch lacks a column that the config needs.
        """
        batch = self._with_old_policy(statistics, batch)
        mask = batch.labels != -100
        # Masked before any exponential: a mask after it would multiply infinities by 0.
        logprobs = masked(statistics.logprobs, mask)
        advantages = masked(required(batch.advantages, "advantages", self), mask)
        log_ratios = torch.zeros_like(logprobs)
        if self.ratio_level != "none":
            old = required(batch.old_logprobs, "old_logprobs", self)
            log_ratios = masked(statistics.logprobs - old, mask)
        rollout = self._rollout_log_weights(logprobs, batch, mask)
        sums = per_document(
            self._document_columns(logprobs, log_ratios, advantages, rollout, batch, mask),
            batch,
            self.token_groups,
        )
        token_advantages = advantages
        if self.ratio_level == "document":
            advantages = per_document_mean(sums["advantages"], batch)
        ratio = self._ratio(self.ratio_level, logprobs, log_ratios, sums.get("log_ratios"), batch)
        weights, kept = self._weights(advantages, rollout, sums, statistics, batch, mask)
        kept_entropy = None
        if self.entropy_bonus.can_act:
            assert statistics.entropy is not None
            kept_entropy = masked(statistics.entropy, mask if kept is None else kept)
        return PolicyTerms(
            mask,
            logprobs,
            log_ratios,
            ratio,
            advantages,
            token_advantages,
            weights,
            self._kl(logprobs, log_ratios, sums, statistics, batch, mask),
            kept_entropy,
        )

    def _with_old_policy(self, statistics: TokenStatistics, batch: BatchKwargs) -> BatchKwargs:
        """The batch with the old policy's log-probabilities, the pass's own with `on_policy`."""
        if not self.on_policy:
            return batch
        return batch.replace(old_logprobs=statistics.logprobs.detach())

    def _rollout_log_weights(
        self, logprobs: Tensor, batch: BatchKwargs, mask: Tensor
    ) -> Tensor | None:
        """old - sampler of each token, current - sampler without a ratio; None without correction.

        The ratio is new / old, so that weight times ratio is new / sampler either way.
        """
        if self.config.rollout_correction is None:
            return None
        reason = " with `rollout_correction`"
        sampler = required(batch.rollout_logprobs, "rollout_logprobs", self, reason)
        policy = logprobs.detach()
        if self.ratio_level != "none":
            policy = required(batch.old_logprobs, "old_logprobs", self, reason)
        return masked(policy - sampler, mask)

    def _document_columns(
        self,
        logprobs: Tensor,
        log_ratios: Tensor,
        advantages: Tensor,
        rollout: Tensor | None,
        batch: BatchKwargs,
        mask: Tensor,
    ) -> dict[str, Tensor]:
        """The per-token values whose sums over documents are needed."""
        config = self.config
        columns: dict[str, Tensor] = {}
        if self.ratio_level not in ("none", "token"):
            columns["log_ratios"] = self.document_log_ratios(log_ratios, advantages)
        if self.ratio_level == "document":
            columns["advantages"] = advantages
        if config.kl is not None and config.kl.ratio_level != "token":
            columns["kl_log_ratios"] = log_ratios
        if config.rollout_correction is not None and config.rollout_correction.level == "document":
            assert rollout is not None
            columns["rollout"] = rollout
        if config.off_policy_mask is not None:
            name = f"{config.off_policy_mask.behaviour}_logprobs"
            behaviour = required(getattr(batch, name), name, self, " with `off_policy_mask`")
            columns["off_policy"] = masked(behaviour - logprobs.detach(), mask)
        return columns

    def _ratio(
        self,
        level: RatioLevel,
        logprobs: Tensor,
        log_ratios: Tensor,
        sums: Tensor | None,
        batch: BatchKwargs,
    ) -> Tensor:
        """The ratio of each token at a level, from its document's summed log-ratios."""
        if level == "none":
            return torch.ones_like(logprobs)
        if level == "token":
            return bounded_exp(log_ratios)
        assert sums is not None
        if level == "document_product":
            return bounded_exp(sums)
        means = per_document_mean(sums, batch)
        if level == "document":
            return bounded_exp(means)
        return bounded_exp(means.detach() + logprob_minus_detached(logprobs))

    def _weights(
        self,
        advantages: Tensor,
        rollout: Tensor | None,
        sums: dict[str, Tensor],
        statistics: TokenStatistics,
        batch: BatchKwargs,
        mask: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The product of all weights, and the mask of the top entropies; None without."""
        config = self.config
        factors: list[Tensor] = []
        if config.rollout_correction is not None:
            assert rollout is not None
            if config.rollout_correction.level == "document":
                rollout = sums["rollout"]
            if config.rollout_correction.mean == "geometric":
                rollout = per_document_mean(rollout, batch)
            factors.append(rollout_weights(rollout, config.rollout_correction))
        if config.off_policy_mask is not None:
            means = per_document_mean(sums["off_policy"], batch)
            kept = off_policy_mask(means, advantages, config.off_policy_mask.threshold)
            factors.append(kept.to(advantages.dtype))
        if config.max_staleness is not None:
            required(batch.current_version, "current_version", self, " with `max_staleness`")
            version = required(batch.model_version, "model_version", self, " with `max_staleness`")
            factors.append(
                staleness_mask(version, batch, config.max_staleness).to(advantages.dtype)
            )
        top = None
        if config.entropy is not None and config.entropy.top_fraction is not None:
            assert statistics.entropy is not None
            groups = (*self.token_groups, self.data_group)
            entropy = statistics.entropy.detach()
            top = top_fraction(entropy, mask, config.entropy.top_fraction, groups)
            factors.append(top.to(advantages.dtype))
        if not factors:
            return None, top
        weights = factors[0]
        for factor in factors[1:]:
            weights = weights * factor
        return weights, top

    def _kl(
        self,
        logprobs: Tensor,
        log_ratios: Tensor,
        sums: dict[str, Tensor],
        statistics: TokenStatistics,
        batch: BatchKwargs,
        mask: Tensor,
    ) -> Tensor | None:
        config = self.config.kl
        if config is None:
            return None
        reference = required(batch.ref_logprobs, "ref_logprobs", self, " with `kl`")
        differences = masked(statistics.logprobs - reference, mask)
        ratio = None
        if config.gradient == "ratio":
            summed = sums.get("kl_log_ratios")
            ratio = self._ratio(config.ratio_level, logprobs, log_ratios, summed, batch)
        return kl_term(differences, ratio, config)
