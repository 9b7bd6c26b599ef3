"""The clipped surrogates: GRPO, GSPO, GSPO-token and LUSPO."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.loss_options import RatioLevel
from fastrl.config.policy_losses import ClippedLossConfig
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms


class GRPOLoss(LanguageModelPolicyGradientLoss[ClippedLossConfig]):
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) of token ratios.

    With `delta`, the loss is at most -delta A where A < 0: min(-min(...), -delta A), the dual clip.
    The two-sided clip, which bounds r and not clip(r), is the same function for delta >= 1 +
    epsilon_high. Where A > 0 the clip is the bound already.

        d loss / d logp = -r A inside of the bounds, 0 where they hold the ratio

    References:
        DeepSeekMath, arXiv:2402.03300, equation 3. Its KL term is the option `kl`, and its mean
        over documents of token means is `normalisation: documents`; the default is the token mean
        of DAPO, arXiv:2503.14476, equation 8. Dual clip: Ye et al., arXiv:1912.09729, equation 5;
        two-sided: INTELLECT-2, arXiv:2505.07291, section 3.4.
    """

    def surrogate(self, terms: PolicyTerms) -> Tensor:
        config, ratio, advantages = self.config, terms.ratio, terms.advantages
        # The minimum, written as the ratio or the bound that holds it: a backward of 3 operations
        # where those of a minimum and a clamp are 15.
        with torch.no_grad():
            below = ratio.clamp(1 - config.epsilon_low, config.delta)
            held = torch.where(advantages < 0, below, ratio.clamp(max=1 + config.epsilon_high))
            is_free = held == ratio
        return -advantages * torch.where(is_free, ratio, held)

    def is_clipped(self, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
        """Below the bound with A < 0; above it with A > 0, above `delta` with A < 0."""
        config, ratio, advantages = self.config, terms.ratio, terms.advantages
        low = (ratio < 1 - config.epsilon_low) & (advantages < 0)
        high = (ratio > 1 + config.epsilon_high) & (advantages > 0)
        if config.delta is not None:
            high = high | ((ratio > config.delta) & (advantages < 0))
        return low, high


class GSPOLoss(GRPOLoss):
    """The surrogate of GRPO on the document's ratio s_d, the geometric mean of token ratios.

        d loss / d logp_t = -(s_d A_d) / n_d for each token of the document, times its weight

    References:
        Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 to 7.
    """

    @property
    def ratio_level(self) -> RatioLevel:
        return "document"


class GSPOTokenLoss(GRPOLoss):
    """The surrogate of GRPO on s_{d,t} = detach(s_d) pi_t / detach(pi_t), with token advantages.

        d loss / d logp_t = -s_d A_t

    With equal advantages in a document it has the value and gradient of GSPO.

    References:
        Group Sequence Policy Optimization, arXiv:2507.18071, equations 13 and 14.
    """

    @property
    def ratio_level(self) -> RatioLevel:
        return "document_token"


class LUSPOLoss(GSPOLoss):
    """GSPO with each document's loss times its number of labels n_d; the sum over all tokens.

        d loss / d logp_t = -s_d A_d / num_documents

    References:
        Length-Unbiased Sequence Policy Optimization, arXiv:2602.05261.
    """
