"""The product of the detached weights and masks of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.config.loss_options import EntropyConfig
from fastrl.config.policy_losses import PolicyGradientLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.quantiles import top_fraction
from fastrl.layers.losses.base import masked
from fastrl.layers.losses.corrections import off_policy_mask, rollout_weights
from fastrl.layers.losses.policy_inputs import PolicyInputs
from fastrl.layers.losses.ratios import per_document_mean


def token_weights(
    config: PolicyGradientLossConfig,
    inputs: PolicyInputs,
    advantages: Tensor,  # [T]
    rollout: Tensor | None,  # [T]
    sums: Mapping[str, Tensor],  # [T] each
    top: Tensor | None,  # [T]
) -> Tensor | None:  # [T]
    """The product of all weights; None without any.

    Args:
        config: of the loss.
        inputs: of the loss.
        advantages: of the token, or of its document where the ratio is the document's.
        rollout: log-weights of the rollout correction.
        sums: sums over documents.
        top: the mask of `top_entropy`.
    """
    factors: list[Tensor] = []
    if config.rollout_correction is not None:
        assert rollout is not None
        if config.rollout_correction.level == "document":
            rollout = sums["rollout"]
        if config.rollout_correction.mean == "geometric":
            rollout = per_document_mean(rollout, inputs.batch)
        factors.append(rollout_weights(rollout, config.rollout_correction))
    if config.off_policy_mask is not None:
        means = per_document_mean(sums["off_policy"], inputs.batch)
        kept = off_policy_mask(means, advantages, config.off_policy_mask.threshold)
        factors.append(kept.to(advantages.dtype))
    if config.max_staleness is not None:
        inputs.column("current_version", "max_staleness")
        version = inputs.column("model_version", "max_staleness")
        kept = staleness_mask(version, inputs.batch, config.max_staleness)
        factors.append(kept.to(advantages.dtype))
    if top is not None:
        factors.append(top.to(advantages.dtype))
    if not factors:
        return None
    weights = factors[0]
    for factor in factors[1:]:
        weights = weights * factor
    return weights


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
