"""DPPO: a trust region in probabilities, not in ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.policy_losses import DPPOLossConfig
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms

_SMALLEST_REST = 2.0**-126
"""Least 1 - p and 1 - q, the smallest normal number of fp32, in every dtype."""


class DPPOLoss(LanguageModelPolicyGradientLoss[DPPOLossConfig]):
    """-M detach(min(r, max_ratio)) A logp, M = 0 where the update leaves the trust region.

    With p = exp(logp), q = exp(old): M = 0 where A > 0, p > q and D > epsilon_high, or A < 0,
    p < q and D > epsilon_low, for the divergence of the two-way split into the label and the rest
        tv  D = |p - q|
        kl  D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)),
            1 - p and 1 - q at least 2^-126, so that D is finite where a label is certain

        d loss / d logp = -M min(r, max_ratio) A

    References:
        Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, section 4.
        Its loss has the value M r A with the same gradient; as in its code, the detached weight
        allows r to be truncated without cutting off the gradient.
    """

    def surrogate(self, terms: PolicyTerms) -> Tensor:
        low, high = self.is_clipped(terms)
        ratio = terms.ratio.detach()
        if self.config.max_ratio is not None:
            ratio = ratio.clamp(max=self.config.max_ratio)
        ratio = torch.where(low | high, 0, ratio)
        return -ratio * terms.advantages * terms.logprobs

    def is_clipped(self, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
        """Tokens that the mask drops: fallen (low) or risen (high) too far."""
        logprobs = terms.logprobs.detach()
        old = logprobs - terms.log_ratios.detach()
        new_p, old_p = logprobs.exp(), old.exp()
        if self.config.divergence == "tv":
            divergence = (new_p - old_p).abs()
        else:
            # 1 - p as -expm1(logp): exact also where p is near 1.
            new_rest = (-torch.expm1(logprobs)).clamp(min=_SMALLEST_REST)
            old_rest = (-torch.expm1(old)).clamp(min=_SMALLEST_REST)
            divergence = old_p * (old - logprobs) + old_rest * (old_rest / new_rest).log()
        falls, rises = new_p < old_p, new_p > old_p
        low = (terms.advantages < 0) & falls & (divergence > self.config.epsilon_low)
        high = (terms.advantages > 0) & rises & (divergence > self.config.epsilon_high)
        return low & terms.mask, high & terms.mask
