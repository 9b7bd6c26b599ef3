"""The KL penalty to a reference policy, estimated from the sampled tokens."""

from __future__ import annotations

from torch import Tensor

from fastrl.config.advantages import KLInRewardConfig
from fastrl.config.loss_options import HIGHEST_RATIO, KLConfig
from fastrl.functional.kl import kl_estimate
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.policy_inputs import PolicyInputs
from fastrl.layers.losses.ratios import ratio_of_level

_LARGEST_ERROR = 0.2  # of one step, relative to the target: Ziegler et al. clip there


class KLCoefficient:
    """The factor of a KL penalty: fixed, or adapted after each step to a target KL.

    With a target K*, after a step over n documents of mean KL K:

        coefficient <- coefficient * (1 + clip(K / K* - 1, -0.2, 0.2) * min(n / horizon, 1))

    Args:
        config: None for no penalty.

    References:
        Ziegler et al., arXiv:1909.08593, section 2.2. Their factor of the error is 0.1; n / horizon
        is that of their code and of verl, here at most 1, so that the coefficient stays above 0.
    """

    def __init__(self, config: KLConfig | KLInRewardConfig | None) -> None:
        self.adaptive = None if config is None else config.adaptive
        self.value = 0.0 if config is None else config.coefficient

    def end_step(self, kl: float, num_documents: float) -> None:
        """Updates the coefficient from the mean KL (nats a token) of the whole optimizer step."""
        if self.adaptive is None:
            return
        error = kl / self.adaptive.target - 1
        error = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        share = min(num_documents / self.adaptive.horizon, 1.0)
        self.value = min(self.value * (1 + error * share), HIGHEST_RATIO)


def kl_term(
    differences: Tensor,  # [T]
    ratio: Tensor | None,  # [T]
    config: KLConfig,
    coefficient: float,
) -> Tensor:  # [T]
    """coefficient * KL per token, with the gradient chosen in the config.

        ratio:             k r,  r = new / old of the token or its document, differentiable
        straight_through:  value of k, gradient d = that of k2
        estimator:         k

    The KL's own gradient is E_old[r (k + dk)] for k1 and k3, and E_new[d] for sampled d; plain k1
    has mean gradient 0 and plain k3 that of KL(reference, policy). With `clamp` k is clamped, and
    dk is 0 beyond it.

    Args:
        differences: logprob - ref_logprob, 0 at slots without label.
        ratio: only for `gradient: ratio`.
        config: of the penalty.
        coefficient: the one in force.

    References:
        DeepSeek-V3.2, arXiv:2512.02556, equation 7: k3 times the ratio. Liu et al.,
        arXiv:2510.01555: k1 in the reward and k2 as a loss have the KL's gradient.
    """
    value = kl_estimate(differences, config.estimator, config.clamp)
    if config.gradient == "ratio":
        assert ratio is not None
        value = value * ratio
    elif config.gradient == "straight_through":
        k2 = kl_estimate(differences, "k2")
        value = value.detach() + (k2 - k2.detach())
    return coefficient * value


def kl_penalty(
    config: KLConfig | None,
    inputs: PolicyInputs,
    sums: Tensor | None,  # [T]
    coefficient: float,
) -> Tensor | None:  # [T]
    """`kl_term` of a loss's inputs and its documents' summed log-ratios; None without `kl`."""
    if config is None:
        return None
    reference = inputs.column("ref_logprobs", "kl")
    differences = at_labels(inputs.statistics.logprobs - reference, inputs.batch)
    ratio = None
    if config.gradient == "ratio":
        ratio = ratio_of_level(config.ratio_level, inputs, sums)
    return kl_term(differences, ratio, config, coefficient)
