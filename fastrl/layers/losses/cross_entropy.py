"""Cross-entropy of the labels."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.losses import CrossEntropyLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, masked
from fastrl.layers.losses.metrics import token_mean


class CrossEntropyLoss(LanguageModelLoss[CrossEntropyLossConfig]):
    """-logprob of each label, normalised."""

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        """The cross-entropy in nats, normalised as the config says."""
        return self.normalise(masked(-statistics.logprobs, batch.labels != -100), batch)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """`loss`, and `entropy` where it was computed."""
        metrics = {"loss": self(statistics, batch)}
        if statistics.entropy is not None:
            metrics["entropy"] = token_mean(statistics.entropy, batch)
        return metrics
