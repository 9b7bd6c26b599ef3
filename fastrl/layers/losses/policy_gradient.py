"""The policy-gradient losses: ratios of the new to the old policy, and their surrogates."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor

from fastrl.config.losses import GRPOLossConfig, GSPOLossConfig, PolicyGradientLossConfig
from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.functional.documents import document_sums
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, masked
from fastrl.layers.losses.metrics import token_mean

# exp is taken of log-ratios within this bound (nats): e^20 = 4.9e8. Beyond it the ratio is
# constant, so neither value nor gradient can leave the range of fp32.
LOG_RATIO_BOUND = 20.0

PolicyGradientConfigT = TypeVar("PolicyGradientConfigT", bound=PolicyGradientLossConfig)


class LanguageModelPolicyGradientLoss(LanguageModelLoss[PolicyGradientConfigT]):
    """Masked log-ratios, document statistics and metrics; a subclass is its surrogate.

    level `token`: r_t = exp(logp_t - old_t).
    level `document`: s_d = exp((1 / n_d) sum_t (logp_t - old_t)) and the mean advantage of
    document d, for each of its tokens; n_d is its number of labels, on all ranks.
    """

    @abstractmethod
    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:  # [T], [T] -> [T]
        """The loss of each token (or of its document) from ratio and advantage."""

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        """The normalised sum of the surrogate over the labelled tokens."""
        ratio, advantages = self.ratios(statistics, batch)
        return self.normalise(
            masked(self.surrogate(ratio, advantages), batch.labels != -100), batch
        )

    def ratios(
        self, statistics: TokenStatistics, batch: BatchKwargs
    ) -> tuple[Tensor, Tensor]:  # [T], [T]
        """Ratio and advantage of each token, at this loss's level; 1 and 0 without label."""
        log_ratios, advantages = self._token_log_ratios(statistics, batch)
        if self.level == "document":
            log_ratios, advantages = self._document_means(log_ratios, advantages, batch)
        return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), advantages

    def _token_log_ratios(
        self, statistics: TokenStatistics, batch: BatchKwargs
    ) -> tuple[Tensor, Tensor]:
        old_logprobs, advantages = batch.old_logprobs, batch.advantages
        if old_logprobs is None or advantages is None:
            missing = "old_logprobs" if old_logprobs is None else "advantages"
            raise ValueError(
                f"`{missing}` must be in the batch for the {type(self).__name__}, got None;"
                " give each Document `logprobs` and `advantage`."
            )
        mask = batch.labels != -100
        # Replaced before any exponential: a mask after it would multiply infinities by 0.
        return masked(statistics.logprobs - old_logprobs, mask), masked(advantages, mask)

    def _document_means(
        self, log_ratios: Tensor, advantages: Tensor, batch: BatchKwargs
    ) -> tuple[Tensor, Tensor]:
        sums = document_sums(
            torch.stack([log_ratios, advantages], dim=1),
            batch.document_index,
            batch.num_documents,
            self.token_groups,
        )
        means = sums[batch.document_index] / batch.label_counts.clamp(min=1)[:, None]
        return means[:, 0].to(log_ratios.dtype), means[:, 1].to(advantages.dtype)

    def gradient_rows(self, batch: BatchKwargs) -> RowSet | None:
        """Rows whose advantage, or whose document's, is not 0."""
        return batch.active_document_rows if self.level == "document" else batch.active_rows

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """Means over the labels of the batch.

        `loss`; `ratio`; `clip_fraction_low` and `_high`: ratio below (above) its bound where that
        matters, A < 0 (A > 0); `clip_fraction`, both; `kl_old_new`, the k3 estimate of
        KL(old, new) from token ratios; `advantage`; `logprob`; `entropy` where it was computed.
        """
        ratio, advantages = self.ratios(statistics, batch)
        low = (ratio < 1 - self.config.epsilon_low) & (advantages < 0)
        high = (ratio > 1 + self.config.epsilon_high) & (advantages > 0)
        log_ratios, _ = self._token_log_ratios(statistics, batch)
        log_ratios = log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        vectors = {
            "ratio": ratio,
            "clip_fraction_low": low.to(ratio.dtype),
            "clip_fraction_high": high.to(ratio.dtype),
            "clip_fraction": (low | high).to(ratio.dtype),
            "kl_old_new": log_ratios.exp() - 1 - log_ratios,
            "advantage": advantages,
            "logprob": statistics.logprobs,
        }
        if statistics.entropy is not None:
            vectors["entropy"] = statistics.entropy
        means = {name: token_mean(vector, batch) for name, vector in vectors.items()}
        return {"loss": self(statistics, batch), **means}


class GRPOLoss(LanguageModelPolicyGradientLoss[GRPOLossConfig | GSPOLossConfig]):
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) of token ratios.

    References:
        DeepSeekMath, arXiv:2402.03300, equation 3. Its KL term is a loss of its own here, and its
        mean over documents of token means is `normalisation: documents`; the default is the
        token mean of DAPO, arXiv:2503.14476, equation 8.
    """

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """The pessimistic one of the plain and the clipped product."""
        clipped = ratio.clamp(1 - self.config.epsilon_low, 1 + self.config.epsilon_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)


class GSPOLoss(GRPOLoss):
    """The surrogate of GRPO on the document's ratio s_d, the geometric mean of token ratios.

    References:
        Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 to 7.
    """

    level = "document"
