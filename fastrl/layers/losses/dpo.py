"""DPO: preferences between packed pairs of documents."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from fastrl.config.losses import DPOLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.documents import document_sums
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, Level, masked, required
from fastrl.layers.losses.metrics import token_mean


class DPOLoss(LanguageModelLoss[DPOLossConfig]):
    """f(m_g) of each pair g of a chosen document c and a rejected one r, mean over pairs.

        m_g = sum_{t in c} (logp_t - ref_t) - sum_{t in r} (logp_t - ref_t)
        sigmoid: -log sigmoid(beta m)    ipo: (m - 1 / (2 beta))^2    hinge: max(0, 1 - beta m)
        d loss / d logp_t = +-f'(m_g) / num_pairs, + in the chosen document

    A pair is a group of the batch (two documents of one `group_id` in the same packed sequence),
    with advantage above 0 for the chosen document and below 0 for the rejected one
    (`fastrl.data.preferences`). With `log_ratio: mean` the sums are means over labels.

    References:
        Rafailov et al., arXiv:2305.18290, equation 7 (sigmoid). Azar et al., arXiv:2310.12036,
        equation 17 (ipo; TRL averages over tokens there, `log_ratio: mean`). SLiC,
        arXiv:2305.10425 (hinge).
    """

    @property
    def level(self) -> Level:
        """A pair."""
        return "group"

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        """The mean over pairs."""
        config = self.config
        margins = self.margins(statistics, batch)
        if config.variant == "sigmoid":
            values = -logsigmoid(config.beta * margins)
        elif config.variant == "ipo":
            values = (margins - 1 / (2 * config.beta)).square()
        else:
            values = relu(1 - config.beta * margins)
        return self.normalise(masked(values, batch.labels != -100), batch)

    def margins(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:  # [T]
        """The margin of each token's pair."""
        mask = batch.labels != -100
        reference = required(batch.ref_logprobs, "ref_logprobs", self)
        advantages = required(batch.advantages, "advantages", self)
        groups = required(batch.group_index, "group_index", self)
        log_ratios = masked(statistics.logprobs - reference, mask)
        if self.config.log_ratio == "mean":
            log_ratios = log_ratios / batch.label_counts.clamp(min=1)
        signed = log_ratios * masked(advantages, mask).sign()
        sums = document_sums(signed, groups, batch.num_groups, self.token_groups)
        return sums[groups].to(signed.dtype)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """Means over pairs: `loss`, `margin` (beta m), `accuracy` (margin above 0)."""
        mask = batch.labels != -100
        margins = self.margins(statistics, batch)
        return {
            "loss": self(statistics, batch),
            "margin": self.normalise(masked(self.config.beta * margins, mask), batch),
            "accuracy": self.normalise(masked((margins > 0).to(margins.dtype), mask), batch),
            "logprob": token_mean(statistics.logprobs, batch),
        }
