"""The loss of a value head."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.heads import ValueLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import LanguageModelLoss, required
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.reduction import token_metrics


class ValueLoss(LanguageModelLoss[ValueLossConfig]):
    """Half the squared error of each value v to its return R, clipped around the old value o.

        0.5 max((v - R)^2, (clip(v, o - epsilon, o + epsilon) - R)^2)

        d loss / d v = v - R, 0 where the clipped error is the larger one

    References:
        Schulman et al., arXiv:1707.06347, and the clip of its implementation (Engstrom et al.,
        arXiv:2005.12729, section 3), there without the 0.5.
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"values"})

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        own, clipped = self._errors(statistics, batch)
        return self.normalise(0.5 * torch.maximum(own, clipped), batch)

    @torch.no_grad()
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """`loss`; `value`, `return`, `return_error` (their difference), each with its moments.

        `clip_fraction` is the share of values whose gradient the clip cuts off.
        """
        own, clipped = self._errors(statistics, batch)
        returns = at_labels(required(batch.returns, "returns", self), batch)
        values = at_labels(_values(statistics), batch)
        means = {} if self.config.epsilon is None else {"clip_fraction": clipped > own}
        moments = {"value": values, "return": returns, "return_error": returns - values}
        return {"loss": self(statistics, batch), **token_metrics(means, moments, batch)}

    def _errors(self, statistics: TokenStatistics, batch: BatchKwargs) -> tuple[Tensor, Tensor]:
        """Squared errors of the values and of the clipped ones, 0 without label."""
        values = at_labels(_values(statistics), batch)
        returns = at_labels(required(batch.returns, "returns", self), batch)
        own = (values - returns).square()
        if self.config.epsilon is None:
            return own, own
        old = at_labels(required(batch.values, "values", self), batch)
        clipped = values.clamp(old - self.config.epsilon, old + self.config.epsilon)
        return own, (clipped - returns).square()


def _values(statistics: TokenStatistics) -> Tensor:  # [T]
    assert statistics.values is not None
    return statistics.values
