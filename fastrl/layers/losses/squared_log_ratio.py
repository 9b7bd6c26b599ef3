"""The squared log-ratio to the behaviour policy, which holds the policy near it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.losses import SquaredLogRatioLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, Scope, required
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.ratios import per_document
from fastrl.layers.losses.reduction import token_metrics


class SquaredLogRatioLoss(LanguageModelLoss[SquaredLogRatioLossConfig]):
    """l_t^2 of each token, or L_d^2 of its document, at each of its tokens.

        l_t = logp_t - behaviour_t,  L_d = sum_t l_t over the document, on all ranks
        d loss / d logp_t = 2 l_t;  document: 2 L_d for each of its n_d equal summands

    Added to `reinforce` with factor tau / 2 it makes -A logp + (tau / 2) l^2, of the gradient of
    (A - tau l)^2 / (2 tau). Nothing is clamped: there is no exponential.

    References:
        Kimi k1.5, arXiv:2501.12599, section 2.3.2: the gradient -A dlogp + (tau / 2) d(L^2) of
        whole documents. DRO, arXiv:2405.19107: the same with A the reward minus a learned value.
        verl's `dro` is that of tokens.
    """

    @property
    def scope(self) -> Scope:
        return self.config.level

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        return self.normalise(self._log_ratios(statistics, batch).square(), batch)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """`loss`, `logprob`, and `log_ratio` with its moments, at the loss's level."""
        log_ratios = self._log_ratios(statistics, batch)
        means, moments = {"logprob": statistics.logprobs}, {"log_ratio": log_ratios}
        loss = self.normalise(log_ratios.square(), batch)
        return {"loss": loss, **token_metrics(means, moments, batch)}

    def _log_ratios(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:  # [T]
        name = f"{self.config.behaviour}_logprobs"
        behaviour = required(getattr(batch, name), name, self)
        log_ratios = at_labels(statistics.logprobs - behaviour, batch)
        if self.config.level == "document":
            sums = per_document({"log_ratios": log_ratios}, batch, self.token_groups)
            log_ratios = at_labels(sums["log_ratios"], batch)
        return log_ratios
