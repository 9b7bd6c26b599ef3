"""The policy that ratios are taken to, where it is not that of the batch."""

from __future__ import annotations

from torch import Tensor

from fastrl.config.loss_options import ProximalConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import required


def with_old_policy(
    loss: object,
    proximal: ProximalConfig | None,
    statistics: TokenStatistics,
    batch: BatchKwargs,
    *,
    on_policy: bool,
) -> BatchKwargs:
    """The batch with the pass's own log-probabilities as the old ones, or those of `proximal`."""
    if on_policy:
        return batch.replace(old_logprobs=statistics.logprobs.detach())
    if proximal is not None:
        return batch.replace(old_logprobs=proximal_logprobs(loss, proximal, statistics, batch))
    return batch


def proximal_logprobs(
    loss: object, config: ProximalConfig, statistics: TokenStatistics, batch: BatchKwargs
) -> Tensor:  # [T]
    """Log-probabilities between the sampler's mu and the policy's own, detached.

        prox = mu + a (detach(logp) - mu),  a = weight, or (s - 1) / s for weights s versions on

    a is 0 where s is 0 or 1. The ratio exp(logp - prox) has the value of exp((1 - a) (logp - mu))
    and the gradient of any ratio, d r / d logp = r.

    Raises:
        ValueError: the batch lacks a column or the version that the weight follows from.

    References:
        A-3PO, arXiv:2512.06547; AReaL's `prox_logp_method: loglinear`.
    """
    reason = " with `proximal`"
    sampler = required(batch.rollout_logprobs, "rollout_logprobs", loss, reason)
    weight: float | Tensor
    if config.weight is None:
        current = required(batch.current_version, "current_version", loss, reason)
        version = required(batch.model_version, "model_version", loss, reason)
        weight = 1 - 1 / (current - version).clamp(min=1).to(sampler.dtype)
    else:
        weight = config.weight
    return sampler + weight * (statistics.logprobs.detach() - sampler)
