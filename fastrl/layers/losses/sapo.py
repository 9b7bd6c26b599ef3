"""SAPO: a soft gate instead of the clip."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fastrl.config.loss_options import RatioLevel
from fastrl.config.policy_losses import SAPOLossConfig
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms


class SAPOLoss(LanguageModelPolicyGradientLoss[SAPOLossConfig]):
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A.

        d loss / d logp = -4 p (1 - p) r A,  p = sigmoid(tau (r - 1)):  -r A at r = 1

    References:
        Soft Adaptive Policy Optimization, arXiv:2511.20347, equations 5 and 6.
    """

    @property
    def ratio_level(self) -> RatioLevel:
        return self.config.ratio_level

    def surrogate(self, terms: PolicyTerms) -> Tensor:
        positive = terms.advantages > 0
        ones = torch.ones_like(terms.ratio)
        tau = torch.where(
            positive, ones * self.config.tau_positive, ones * self.config.tau_negative
        )
        # As a logarithm: the derivative of a sigmoid near 1 is a difference of 1 and it.
        gate = logsigmoid(tau * (terms.ratio - 1)).exp()
        return -terms.advantages * gate * (4 / tau)
