"""The KL penalty to a reference policy, estimated from the sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.loss_options import KLConfig
from fastrl.layers.losses.base import masked
from fastrl.layers.losses.policy_inputs import PolicyInputs
from fastrl.layers.losses.ratios import LOG_RATIO_BOUND, ratio_of_level


def kl_estimate(differences: Tensor, estimator: str) -> Tensor:  # [T]
    """The estimate of KL(policy, reference) from one token, d = logprob - ref_logprob.

        k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d

    d saturates at `LOG_RATIO_BOUND` in k3, where the exponential would overflow.

    References:
        Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html).
    """
    if estimator == "k1":
        return differences
    if estimator == "k2":
        return differences.square() / 2
    bounded = differences.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(-bounded) + bounded


def kl_term(
    differences: Tensor,  # [T]
    ratio: Tensor | None,  # [T]
    config: KLConfig,
) -> Tensor:  # [T]
    """coefficient * KL per token, with the gradient chosen in the config.

        ratio:             k r,  r = new / old of the token or its document, differentiable
        straight_through:  value of k, gradient d = that of k2
        estimator:         k

    The KL's own gradient is E_old[r (k + dk)] for k1 and k3, and E_new[d] for sampled d; plain k1
    has mean gradient 0 and plain k3 that of KL(reference, policy).

    Args:
        differences: logprob - ref_logprob, 0 at slots without label.
        ratio: only for `gradient: ratio`.
        config: of the penalty.

    References:
        DeepSeek-V3.2, arXiv:2512.02556, equation 7: k3 times the ratio. Liu et al.,
        arXiv:2510.01555: k1 in the reward and k2 as a loss have the KL's gradient.
    """
    value = kl_estimate(differences, config.estimator)
    if config.gradient == "ratio":
        assert ratio is not None
        value = value * ratio
    elif config.gradient == "straight_through":
        k2 = kl_estimate(differences, "k2")
        value = value.detach() + (k2 - k2.detach())
    return config.coefficient * value


def kl_penalty(
    config: KLConfig | None,
    inputs: PolicyInputs,
    sums: Tensor | None,  # [T]
) -> Tensor | None:  # [T]
    """`kl_term` of a loss's inputs and its documents' summed log-ratios; None without `kl`."""
    if config is None:
        return None
    reference = inputs.column("ref_logprobs", "kl")
    differences = masked(inputs.statistics.logprobs - reference, inputs.mask)
    ratio = None
    if config.gradient == "ratio":
        ratio = ratio_of_level(config.ratio_level, inputs, sums)
    return kl_term(differences, ratio, config)
