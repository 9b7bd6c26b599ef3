"""The negative log-likelihood of what the policy did well."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.losses import PositiveNLLLossConfig
from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, required
from fastrl.layers.losses.masks import masked
from fastrl.layers.losses.normalisation import at_least_one, draw_weighted
from fastrl.layers.losses.reduction import token_mean


class PositiveNLLLoss(LanguageModelLoss[PositiveNLLLossConfig]):
    """-sum over labels with A > 0 of logp / their number in the optimizer step.

    With an advantage a document these are the labels of the documents whose advantage is above 0.

        d loss / d logp = -1 where A > 0, else 0

    References:
        VAPO, arXiv:2504.05118, section 4.3 (positive-example LM loss), which it adds with a factor
        of 0.1. Its positive examples are the correct answers; with advantages in a group, those of
        a group of correct answers alone have A = 0 and are left out here.
    """

    def gradient_rows(self, batch: BatchKwargs) -> RowSet:
        """Rows with an advantage, as the surrogates beside it."""
        return batch.rows_with_labels if batch.active_rows is None else batch.active_rows

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        count = batch.num_positive_labels_in_batch
        required(count, "num_positive_labels_in_batch", self)
        assert count is not None
        values = draw_weighted(masked(statistics.logprobs, self._is_positive(batch)), batch)
        return -values.sum() / at_least_one(count)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """`loss`; `positive_fraction`, the share of the labels that have an advantage above 0."""
        positive = self._is_positive(batch).to(statistics.logprobs.dtype)
        return {
            "loss": self(statistics, batch),
            "positive_fraction": token_mean(positive, batch),
        }

    def _is_positive(self, batch: BatchKwargs) -> Tensor:  # [T]
        advantages = required(batch.advantages, "advantages", self)
        return (batch.labels != -100) & (advantages > 0)
