"""CISPO: the clipped ratio as a detached weight."""

from __future__ import annotations

from torch import Tensor

from fastrl.config.loss_options import RatioLevel
from fastrl.config.policy_losses import CISPOLossConfig
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms


class CISPOLoss(LanguageModelPolicyGradientLoss[CISPOLossConfig]):
    """-detach(clip(r, 1 - epsilon_low, 1 + epsilon_high)) A logp: no token loses its gradient.

        d loss / d logp = -clip(r) A

    References:
        MiniMax-M1, arXiv:2506.13585, equations 4 and 5. ScaleRL, arXiv:2510.13786, caps the ratio
        itself at epsilon_max = 1 + `epsilon_high`, which TRL calls `epsilon_high`.
    """

    @property
    def ratio_level(self) -> RatioLevel:
        return self.config.ratio_level

    def surrogate(self, terms: PolicyTerms) -> Tensor:
        ratio = terms.ratio.detach()
        low = None if self.config.epsilon_low is None else 1 - self.config.epsilon_low
        return -ratio.clamp(low, 1 + self.config.epsilon_high) * terms.advantages * terms.logprobs

    def is_clipped(self, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
        """Ratios beyond a bound, whatever the advantage: the bounds hold for both signs."""
        high = terms.mask & (terms.ratio > 1 + self.config.epsilon_high)
        low = terms.mask & False
        if self.config.epsilon_low is not None:
            low = terms.mask & (terms.ratio < 1 - self.config.epsilon_low)
        return low, high
