"""DPO: preferences between packed pairs of documents."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from fastrl.config.losses import DPOLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.documents import document_sums
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, Scope, required
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.pairs import check_pairs
from fastrl.layers.losses.reduction import token_mean


class DPOLoss(LanguageModelLoss[DPOLossConfig]):
    """f(m_g) of each pair g of a chosen document c and a rejected one r, mean over pairs.

        m_g = sum_{t in c} (logp_t - ref_t) - sum_{t in r} (logp_t - ref_t)
        sigmoid: -log sigmoid(beta m)    ipo: (m - 1 / (2 beta))^2    hinge: max(0, 1 - beta m)
        d loss / d logp_t = +-f'(m_g) / num_pairs, + in the chosen document

    A pair is a group of the batch (two documents of one `group_id` in the same packed sequence),
    with advantage above 0 for the chosen document alone (`fastrl.data.preferences`). With
    `log_ratio: mean` the sums are means over labels. Any other group with labels is refused, on a
    GPU by an asynchronous assertion.

    References:
        Rafailov et al., arXiv:2305.18290, equation 7 (sigmoid). Azar et al., arXiv:2310.12036,
        equation 17 (ipo; TRL averages over tokens there, `log_ratio: mean`). SLiC,
        arXiv:2305.10425 (hinge).
    """

    @property
    def scope(self) -> Scope:
        return "group"

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        return self.value(self.margins(statistics, batch), batch)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """Means over pairs: `loss`, `margin` (beta m), `accuracy` (margin above 0)."""
        return self._metrics(self.margins(statistics, batch), statistics, batch)

    def with_metrics(
        self, statistics: TokenStatistics, batch: BatchKwargs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its metrics from the same margins: one all-reduce."""
        margins = self.margins(statistics, batch)
        with torch.no_grad():
            metrics = self._metrics(margins.detach(), statistics.map(Tensor.detach), batch)
        return self.value(margins, batch), metrics

    def value(self, margins: Tensor, batch: BatchKwargs) -> Tensor:  # [T]
        """The mean over pairs of the loss of their margins."""
        config = self.config
        if config.variant == "sigmoid":
            values = -logsigmoid(config.beta * margins)
        elif config.variant == "ipo":
            values = (margins - 1 / (2 * config.beta)).square()
        else:
            values = relu(1 - config.beta * margins)
        return self.normalise(at_labels(values, batch), batch)

    def margins(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:  # [T]
        """The margin of each token's pair.

        Raises:
            ValueError: the batch lacks a column, or a group is not a pair.
        """
        mask = batch.labels != -100
        reference = required(batch.ref_logprobs, "ref_logprobs", self)
        advantages = required(batch.advantages, "advantages", self)
        groups = required(batch.group_index, "group_index", self)
        is_chosen = advantages > 0
        log_ratios = at_labels(statistics.logprobs - reference, batch)
        label_counts = batch.label_counts.clamp(min=1)
        if self.config.log_ratio == "mean":
            log_ratios = log_ratios / label_counts
        shares = mask / label_counts.to(log_ratios.dtype)
        columns = torch.stack(
            [torch.where(is_chosen, log_ratios, -log_ratios), shares * is_chosen, shares], dim=1
        )
        sums = document_sums(columns, groups, batch.num_groups, self.token_groups)
        check_pairs(sums[:, 1], sums[:, 2])
        return sums[groups, 0].to(log_ratios.dtype)

    def _metrics(
        self, margins: Tensor, statistics: TokenStatistics, batch: BatchKwargs
    ) -> dict[str, Tensor]:
        return {
            "loss": self.value(margins, batch),
            "margin": self.normalise(at_labels(self.config.beta * margins, batch), batch),
            "accuracy": self.normalise(at_labels((margins > 0).to(margins.dtype), batch), batch),
            "logprob": token_mean(statistics.logprobs, batch),
        }
