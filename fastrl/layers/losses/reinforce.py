"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from torch import Tensor

from fastrl.config.loss_options import RatioLevel
from fastrl.config.policy_losses import ReinforceLossConfig
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms


class ReinforceLoss(LanguageModelPolicyGradientLoss[ReinforceLossConfig]):
    """-A logp. Needs no old log-probabilities.

        d loss / d logp = -A

    References:
        Williams, 1992. With leave-one-out advantages (`leave_one_out` of `group_advantages`) it is
        RLOO, Ahmadian et al., arXiv:2402.14740, equation 8, whose document log-probability is the
        sum over tokens: `normalisation: constant` with `length: 1`.
    """

    @property
    def ratio_level(self) -> RatioLevel:
        return "none"

    def surrogate(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * terms.logprobs
