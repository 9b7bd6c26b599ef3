"""fastrl's policy-gradient losses as policy losses of verl.

`fastrl.integrations.verl` registers them; verl calls one by its name, as it calls its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from fastrl.config.losses import AnyLossConfig
from fastrl.config.policy_losses import PolicyGradientLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses import LanguageModelPolicyGradientLoss, build_loss, finish_metrics

# Loss and metrics, called by keyword with the tensors of `_verl_batch`.
VerlLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

_NORMALISATIONS = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "documents",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
# verl averages these over micro-batches and ranks.
_METRICS = {
    "clip_fraction": "actor/pg_clipfrac",
    "clip_fraction_low": "actor/clip_fraction_low",
    "clip_fraction_high": "actor/clip_fraction_high",
    "kl_old_new_k1": "actor/ppo_kl",
    "kl_old_new": "actor/kl_old_new",
    "ratio": "actor/ratio",
    "ratio_ess": "actor/ratio_ess",
}


def verl_loss(options: Mapping[str, Any], *, dual_clip: bool = False) -> VerlLoss:
    """The loss of `options` in the form of verl's policy losses.

        loss = dp_size * normalise(surrogate(ratio, rollout_is_weights * advantages))

    A row of verl's batch is a document, so that the ratio of `gspo` is that of all its labels. The
    normalisation is that of verl's `loss_agg_mode`, over verl's counts of the whole mini-batch.
    The factor dp_size undoes the mean over data ranks that FSDP takes of the gradients.

    Args:
        options: of a loss's config, `type` among them. `epsilon_low` and `epsilon_high`, where the
            loss has them and they are not given, are verl's `clip_ratio_low` and
            `clip_ratio_high`, or `clip_ratio`.
        dual_clip: whether `delta` is verl's `clip_ratio_c`.

    Returns:
        A function for `register_policy_loss`: it takes `old_log_prob`, `log_prob`, `advantages`,
        `response_mask` [B, L], `loss_agg_mode`, verl's actor config and `rollout_is_weights`, and
        gives the scalar loss and means over the labels of the micro-batch.

    Raises:
        ValueError: an option that verl sets or whose columns it does not have.
    """
    known = type(_checked(options)).model_fields

    def loss(
        old_log_prob: Tensor,  # [B, L]
        log_prob: Tensor,  # [B, L]
        advantages: Tensor,  # [B, L]
        response_mask: Tensor,  # [B, L]
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,  # [B, L]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if config is None:
            raise ValueError("`config` must be verl's actor config, got None.")
        clip = _clip_options(config, dual_clip=dual_clip)
        values = {name: value for name, value in clip.items() if name in known}
        values |= {**options, **_normalisation(loss_agg_mode, config, log_prob.shape[1])}
        ours = build_loss(TypeAdapter(AnyLossConfig).validate_python(values))
        assert isinstance(ours, LanguageModelPolicyGradientLoss)
        if rollout_is_weights is not None:
            # The surrogates are positively homogeneous in the advantage.
            advantages = advantages * rollout_is_weights
        batch = _verl_batch(old_log_prob, advantages, response_mask)
        flat = log_prob.flatten()
        statistics = TokenStatistics(flat, None, torch.zeros_like(flat))
        info = config.global_batch_info
        of_step = batch.replace(
            num_labels_in_batch=_count(info, "batch_num_tokens", batch.num_labels_in_batch),
            num_documents_in_batch=_count(info, "global_batch_size", batch.num_documents_in_batch),
        )
        value = ours(statistics, of_step) * info.get("dp_size", 1)
        found = finish_metrics(ours.metrics(statistics.map(Tensor.detach), batch))
        return value, {verl: found[name] for name, verl in _METRICS.items() if name in found}

    return loss


def _checked(options: Mapping[str, Any]) -> PolicyGradientLossConfig:
    """The config of a policy loss without what verl decides or does not have."""
    for name in ("normalisation", "length", "weight"):
        if name in options:
            raise ValueError(
                f"`{name}` must not be an option of a loss in verl, got {options[name]!r}: verl"
                " sets it; use `loss_agg_mode` and `loss_scale_factor`."
            )
    config = TypeAdapter(AnyLossConfig).validate_python(dict(options))
    if not isinstance(config, PolicyGradientLossConfig):
        raise ValueError(
            f"`type` must be a policy-gradient loss, got {config.type!r}; verl has no place for"
            " others."
        )
    missing = config.required_columns() - {"advantages", "old_logprobs"}
    if missing or config.entropy is not None:
        wanted = sorted(missing) or ["entropy"]
        raise ValueError(
            f"the loss {config.type!r} must need no column but advantages and old_logprobs, got"
            f" options that need {wanted}; verl adds KL, entropy and rollout weights itself"
            " (`use_kl_loss`, `entropy_coeff`, `algorithm.rollout_correction`)."
        )
    if build_loss(config).scope == "batch":
        raise ValueError(
            f"`type` must not be {config.type!r}, which compares the tokens of all ranks, as verl"
            " gives a loss those of one; use verl's own."
        )
    return config


def _clip_options(config: Any, *, dual_clip: bool) -> dict[str, float]:
    low, high = config.clip_ratio_low, config.clip_ratio_high
    options = {
        "epsilon_low": config.clip_ratio if low is None else low,
        "epsilon_high": config.clip_ratio if high is None else high,
    }
    return options | {"delta": config.clip_ratio_c} if dual_clip else options


def _normalisation(mode: str, config: Any, width: int) -> dict[str, Any]:
    if mode not in _NORMALISATIONS:
        raise ValueError(
            f"`loss_agg_mode` must be one of {sorted(_NORMALISATIONS)}, got {mode!r}; a sum without"
            " a count has no place in a loss of fastrl."
        )
    options: dict[str, Any] = {"normalisation": _NORMALISATIONS[mode]}
    if mode == "seq-mean-token-sum":
        options["length"] = 1
    if mode == "seq-mean-token-sum-norm":
        options["length"] = config.global_batch_info.get("loss_scale_factor") or width
    return options


def _count(info: Mapping[str, Any], name: str, own: int | Tensor) -> int | Tensor:
    """verl's count of the mini-batch, or the micro-batch's own where one rank has no other."""
    value: int | Tensor | None = info.get(name)
    if value is None and info.get("dp_size", 1) > 1:
        raise ValueError(
            f"`{name}` must be in `global_batch_info` with dp_size {info['dp_size']}, got None; the"
            " count of one rank is not that of the step."
        )
    return own if value is None else value


def _verl_batch(
    old_logprobs: Tensor,  # [B, L]
    advantages: Tensor,  # [B, L]
    mask: Tensor,  # [B, L]
) -> BatchKwargs:
    """The rows of verl's batch as documents. Slots outside the mask have no label."""
    is_label = mask.bool()
    lengths = is_label.sum(1)
    rows, width = mask.shape
    documents = torch.arange(rows, device=mask.device)[:, None].expand(rows, width).flatten()
    # A loss reads of the labels only where there are none.
    labels = torch.where(is_label, 0, -100).flatten()
    return BatchKwargs(
        tokens=torch.zeros_like(labels),
        positions=torch.arange(width, device=mask.device).repeat(rows),
        labels=labels,
        document_index=documents,
        label_counts=lengths.to(old_logprobs.dtype)[documents],
        num_documents=rows,
        num_labels_in_batch=lengths.sum(),
        num_documents_in_batch=(lengths > 0).sum(),
        advantages=advantages.flatten(),
        old_logprobs=old_logprobs.flatten(),
    )
