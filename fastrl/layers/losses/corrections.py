"""Detached weights and masks by the log-ratio of two policies: rollout correction, off-policy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl.config.loss_options import RolloutCorrectionConfig
from fastrl.config.policy_losses import PolicyGradientLossConfig
from fastrl.layers.losses.base import masked
from fastrl.layers.losses.policy_inputs import PolicyInputs
from fastrl.layers.losses.ratios import bounded_exp


def has_document_weights(config: PolicyGradientLossConfig) -> bool:
    """Whether a weight depends on the whole document."""
    rollout = config.rollout_correction
    by_rollout = rollout is not None and rollout.level == "document"
    return by_rollout or config.off_policy_mask is not None


def correction_columns(
    config: PolicyGradientLossConfig, inputs: PolicyInputs, rollout: Tensor | None
) -> dict[str, Tensor]:  # [T] each
    """The per-token values whose sums over documents the weights need."""
    columns: dict[str, Tensor] = {}
    if config.rollout_correction is not None and config.rollout_correction.level == "document":
        assert rollout is not None
        columns["rollout"] = rollout
    if config.off_policy_mask is not None:
        name = f"{config.off_policy_mask.behaviour}_logprobs"
        behaviour = inputs.column(name, "off_policy_mask")
        columns["off_policy"] = masked(behaviour - inputs.logprobs.detach(), inputs.mask)
    return columns


def rollout_log_weights(
    config: RolloutCorrectionConfig | None, inputs: PolicyInputs, *, has_ratio: bool
) -> Tensor | None:  # [T]
    """old - sampler of each token, current - sampler without a ratio; None without correction.

    The ratio is new / old, so that weight times ratio is new / sampler either way.
    """
    if config is None:
        return None
    sampler = inputs.column("rollout_logprobs", "rollout_correction")
    policy = inputs.logprobs.detach()
    if has_ratio:
        policy = inputs.column("old_logprobs", "rollout_correction")
    return masked(policy - sampler, inputs.mask)


def rollout_weights(
    log_weights: Tensor,  # [T]
    config: RolloutCorrectionConfig,
) -> Tensor:  # [T]
    """Importance weights w = policy / sampler, bounded.

        truncate: min(max(w, low), high)      mask: w if low <= w <= high else 0

    Args:
        log_weights: log w, without gradient, of each token, or of its document (the sum of its
            tokens' for `mean: product`, their mean for `mean: geometric`).
        config: of the correction.

    References:
        Truncated: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training, 2025. Masked: Liu et al., When Speed Kills Stability, 2025; IcePop in Ling,
        arXiv:2510.18855.
    """
    weights = bounded_exp(log_weights)
    low = 0.0 if config.low is None else config.low
    high = math.inf if config.high is None else config.high
    if config.mode == "truncate":
        return weights.clamp(low, high)
    return torch.where((weights >= low) & (weights <= high), weights, 0)


def off_policy_mask(
    mean_log_ratios: Tensor,  # [T]
    advantages: Tensor,  # [T]
    threshold: float,
) -> Tensor:  # [T]
    """Whether a token is kept: A >= 0, or its document's mean of behaviour - new <= threshold.

    References:
        DeepSeek-V3.2, arXiv:2512.02556, equation 9.
    """
    return (advantages >= 0) | (mean_log_ratios <= threshold)
