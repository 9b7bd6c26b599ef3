"""Detached weights and masks of tokens: rollout correction, off-policy and staleness masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl.config.loss_options import RolloutCorrectionConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.layers.losses.ratios import bounded_exp


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


def staleness_mask(model_version: Tensor, batch: BatchKwargs, max_staleness: int) -> Tensor:  # [T]
    """Whether a token's document was sampled by weights at most `max_staleness` versions old."""
    assert batch.current_version is not None
    return batch.current_version - model_version <= max_staleness
