"""The product of the detached weights and masks of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import mul

from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.config.corrections import CorrectionConfig
from fastrl.config.loss_options import EntropyConfig
from fastrl.config.policy_losses import PolicyGradientLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.quantiles import top_fraction
from fastrl.layers.losses.base import Scope
from fastrl.layers.losses.masks import masked
from fastrl.layers.losses.policy_inputs import PolicyInputs


def weights_scope(
    config: PolicyGradientLossConfig, corrections: Mapping[str, CorrectionConfig]
) -> Scope:
    """What a token's weight depends on: that token alone, its document, or the micro-batch."""
    levels = {entry.level for entry in corrections.values()}
    selects = config.entropy is not None and config.entropy.top_fraction is not None
    if selects or "batch" in levels:
        return "batch"
    return "document" if "document" in levels else "token"


def token_weights(
    max_staleness: int | None,
    inputs: PolicyInputs,
    corrections: Mapping[str, Tensor],  # [T] each
    top: Tensor | None,  # [T]
) -> Tensor | None:  # [T]
    """The product of all weights, of corrections, staleness and `top_entropy`; None without any."""
    dtype = inputs.advantages.dtype
    factors = list(corrections.values())
    if max_staleness is not None:
        inputs.column("current_version", "max_staleness")
        version = inputs.column("model_version", "max_staleness")
        factors.append(staleness_mask(version, inputs.batch, max_staleness).to(dtype))
    if top is not None:
        factors.append(top.to(dtype))
    return reduce(mul, factors) if factors else None


def top_entropy(
    config: EntropyConfig | None, inputs: PolicyInputs, groups: Sequence[ProcessGroup | None]
) -> Tensor | None:  # [T]
    """Whether a token is of the `top_fraction` of entropies of all ranks; None without."""
    if config is None or config.top_fraction is None:
        return None
    assert inputs.statistics.entropy is not None
    entropy = inputs.statistics.entropy.detach()
    return top_fraction(entropy, inputs.mask, config.top_fraction, groups)


def kept_entropy(inputs: PolicyInputs, top: Tensor | None) -> Tensor:  # [T]
    """The entropies that a bonus acts on: of all labels, or of those of `top_entropy`."""
    assert inputs.statistics.entropy is not None
    return masked(inputs.statistics.entropy, inputs.mask if top is None else top)


def staleness_mask(model_version: Tensor, batch: BatchKwargs, max_staleness: int) -> Tensor:  # [T]
    """Whether a token's document was sampled by weights at most `max_staleness` versions old."""
    assert batch.current_version is not None
    return batch.current_version - model_version <= max_staleness
