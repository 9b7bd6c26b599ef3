"""Cross-entropy of the labels, and the z-loss."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.losses import CrossEntropyLossConfig, ZLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.reduction import token_mean, token_metrics


class CrossEntropyLoss(LanguageModelLoss[CrossEntropyLossConfig]):
    """-logprob of each label, normalised.

    With `label_smoothing` a, the target is (1 - a) onehot + a / V:
        (1 - a) (-logp) + a (lse - mean_v z_v)

        d loss / d logp = -(1 - a),  d / d lse = a,  d / d mean z = -a

    References:
        Szegedy et al., arXiv:1512.00567, section 7.
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"mean_logit"}) if self.config.label_smoothing else frozenset()

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        values = -statistics.logprobs
        smoothing = self.config.label_smoothing
        if smoothing:
            assert statistics.mean_logit is not None
            uniform = statistics.logsumexp - statistics.mean_logit
            values = (1 - smoothing) * values + smoothing * uniform
        return self.normalise(at_labels(values, batch), batch)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """`loss`; `logprob`; `entropy` where it was computed."""
        means = {"logprob": statistics.logprobs}
        if statistics.entropy is not None:
            means["entropy"] = statistics.entropy
        return {"loss": self(statistics, batch), **token_metrics(means, {}, batch)}


class ZLoss(LanguageModelLoss[ZLossConfig]):
    """(log sum exp z)^2 of each label's logits, normalised.

        d loss / d lse = 2 lse

    References:
        ST-MoE, arXiv:2202.08906, equation 5; PaLM, arXiv:2204.02311, section 5.
    """

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        # Masked before the square, whose derivative would multiply 0 by a NaN or infinity.
        logsumexp = at_labels(statistics.logsumexp, batch)
        return self.normalise(logsumexp.square(), batch)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """`loss`, and `logsumexp`."""
        return {
            "loss": self(statistics, batch),
            "logsumexp": token_mean(statistics.logsumexp, batch),
        }
