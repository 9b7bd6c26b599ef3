"""VESPO: a smooth weight from the product of the document's ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.loss_options import RatioLevel
from fastrl.config.policy_losses import VESPOLossConfig
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms


class VESPOLoss(LanguageModelPolicyGradientLoss[VESPOLossConfig]):
    """-detach(phi(W)) A logp, W the product of the document's token ratios.

        phi(W) = W^k exp(lambda (1 - W)),  (k, lambda) by the sign of A;  phi(1) = 1
        d loss / d logp = -phi(W) A

    References:
        VESPO, arXiv:2602.10693, algorithm 1, with k = c1 and lambda = c2. log W saturates at 20;
        TRL and the authors' code bound it from below at log 1e-8, where phi is 0 to 15 digits.
    """

    @property
    def ratio_level(self) -> RatioLevel:
        return "document_product"

    def surrogate(self, terms: PolicyTerms) -> Tensor:
        config, ratio = self.config, terms.ratio.detach()
        positive = terms.advantages >= 0
        ones = torch.ones_like(ratio)
        power = torch.where(positive, ones * config.power_positive, ones * config.power_negative)
        rate = torch.where(positive, ones * config.rate_positive, ones * config.rate_negative)
        phi = (power * ratio.log() + rate * (1 - ratio)).exp()
        return -phi * terms.advantages * terms.logprobs
