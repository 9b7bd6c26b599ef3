"""The base of the policy-gradient losses: what a surrogate is, and what is made of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.entropy import EntropyBonus
from fastrl.layers.losses.kl import KLCoefficient
from fastrl.layers.losses.policy_metrics import policy_metrics
from fastrl.layers.losses.policy_terms import PolicyTerms, weighted
from fastrl.layers.losses.preparation import PolicyGradientConfigT, PolicyPreparation


class LanguageModelPolicyGradientLoss(PolicyPreparation[PolicyGradientConfigT]):
    """The loss around a surrogate, by the config's options; a subclass defines the surrogate.

        loss = normalise(weights * surrogate(ratio, A) + kl) - bonus * mean(entropy)

    The ratio is that of `ratio_of_level`. Sums over a document include the tokens of all ranks.

    Attributes:
        on_policy: whether the old policy is the policy itself, old = detach(logp) of the same call,
            so that l_t is 0 with gradient 1; also in `rollout_correction` (old - sampler), in
            `off_policy_mask` (old - new) and in the metrics. `old_logprobs` of the batch are not
            read then. It begins as the config says and may change between calls: a trainer whose
            first update follows the sampling needs no earlier pass for it.
        entropy_bonus, kl_coefficient: the factors of bonus and KL term, and their controllers.
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
        self.kl_coefficient = KLCoefficient(config.kl)

    @abstractmethod
    def surrogate(self, terms: PolicyTerms) -> Tensor:  # [T]
        """The loss of each token (or of its document) from ratio, advantage and logprob."""

    def is_clipped(self, terms: PolicyTerms) -> tuple[Tensor, Tensor] | None:  # [T], [T]
        """Whether a token's gradient is cut off below, above its bound; None without a clip."""
        return None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.config.entropy is None else frozenset({"entropy"})

    def gradient_rows(self, batch: BatchKwargs) -> RowSet:
        """Rows with a non-zero advantage, or whose document has one; all with other terms."""
        rows = batch.active_document_rows if self.scope == "document" else batch.active_rows
        config = self.config
        has_other = config.kl is not None or config.on_policy_distillation is not None
        if rows is None or has_other or self.entropy_bonus.can_act or self.scope == "batch":
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
        batch = self._with_old_policy(statistics, batch)
        clipped, bonus, kl = self.is_clipped(terms), self.entropy_bonus, self.kl_coefficient
        return policy_metrics(terms, statistics, batch, value, clipped=clipped, bonus=bonus, kl=kl)

    def value(self, terms: PolicyTerms, batch: BatchKwargs) -> Tensor:
        """The loss of prepared terms, a scalar."""
        loss = self.normalise(weighted(self.surrogate(terms), terms), batch)
        return self.entropy_bonus.subtracted(loss, terms.kept_entropy, batch)
