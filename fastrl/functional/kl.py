"""Estimators of a KL divergence from sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

# Log-ratios are clamped to this bound (nats) before an exponential: e^20 = 4.9e8. Beyond it the
# exponential is constant, so neither value nor gradient can leave the range of fp32.
LOG_RATIO_BOUND = 20.0


def saturated(log_ratios: Tensor) -> Tensor:
    """Log-ratios clamped to `LOG_RATIO_BOUND`, with gradient 0 from there on."""
    # One operation, where the gradient of a clamp takes five; that of a NaN passes.
    return hardtanh(log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_estimate(differences: Tensor, estimator: str, bound: float | None = None) -> Tensor:  # [T]
    """The estimate of KL(policy, reference) from one token, d = logprob - ref_logprob.

        k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d

    d saturates at `LOG_RATIO_BOUND` in k3, where the exponential would overflow.

    Args:
        differences: d of each token, any dtype.
        estimator: "k1", "k2" or "k3".
        bound: the estimate is clamped to +-`bound`, with gradient 0 beyond it; None: not.

    References:
        Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html).
    """
    if estimator == "k1":
        value = differences
    elif estimator == "k2":
        value = differences.square() / 2
    else:
        bounded = saturated(differences)
        value = torch.expm1(-bounded) + bounded
    return value if bound is None else value.clamp(-bound, bound)
