"""Distillation: the divergence from a teacher's distribution over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.losses import DistillationLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.reduction import token_mean


class DistillationLoss(LanguageModelLoss[DistillationLossConfig]):
    """The divergence of each labelled token (`teacher_divergence`) in nats, normalised.

    References:
        Generalised knowledge distillation, arXiv:2306.13649, equation 1 (Jensen-Shannon).
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"divergence"})

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        assert statistics.divergence is not None
        return self.normalise(at_labels(statistics.divergence, batch), batch)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """`loss`, and `divergence` as the mean over tokens."""
        assert statistics.divergence is not None
        return {
            "loss": self(statistics, batch),
            "divergence": token_mean(statistics.divergence, batch),
        }
