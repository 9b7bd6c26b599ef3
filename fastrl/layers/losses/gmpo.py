"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.loss_options import RatioLevel
from fastrl.config.policy_losses import GMPOLossConfig
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms


class GMPOLoss(LanguageModelPolicyGradientLoss[GMPOLossConfig]):
    """-A_d exp((1 / n_d) sum_t c_t), c_t the log-ratio l_t clipped on the side that A_t gains.

    A_d is the document's mean advantage, A_t the token's own, by whose sign it is clipped.

        c_t = min(l_t, epsilon_high) where A_t > 0, else max(l_t, -epsilon_low)
        d loss / d logp_t = -A_d exp(mean c) / n_d where l_t is not clipped, times its weight

    References:
        Geometric-Mean Policy Optimization, arXiv:2507.20673, equation 4 and algorithm 1. The
        default (e^-0.4, e^0.4) is its section 4.
    """

    @property
    def ratio_level(self) -> RatioLevel:
        return "document"

    def document_log_ratios(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        above = log_ratios.clamp(max=self.config.epsilon_high)
        below = log_ratios.clamp(min=-self.config.epsilon_low)
        return torch.where(advantages > 0, above, below)

    def surrogate(self, terms: PolicyTerms) -> Tensor:
        return -terms.ratio * terms.advantages

    def is_clipped(self, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
        """Tokens whose log-ratio is held at a bound, by the sign of their own advantage.

        A document whose mean advantage is 0 has no loss, and nothing to clip.
        """
        gains, has_loss = terms.token_advantages > 0, terms.advantages != 0
        low = (terms.log_ratios < -self.config.epsilon_low) & ~gains & has_loss
        high = (terms.log_ratios > self.config.epsilon_high) & gains & has_loss
        return low, high
