"""The losses of the head: small functions of per-token statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.distributed import ProcessGroup

from fastrl.config.losses import AnyLossConfig
from fastrl.config.user_losses import user_loss
from fastrl.functional.metrics import add_metrics, finish_metrics, reduce_metrics
from fastrl.layers.losses.base import LanguageModelLoss
from fastrl.layers.losses.cispo import CISPOLoss
from fastrl.layers.losses.clipped import GRPOLoss, GSPOLoss, GSPOTokenLoss, LUSPOLoss
from fastrl.layers.losses.covariance import ClipCovLoss, KLCovLoss
from fastrl.layers.losses.cross_entropy import CrossEntropyLoss, ZLoss
from fastrl.layers.losses.distillation import DistillationLoss
from fastrl.layers.losses.dpo import DPOLoss
from fastrl.layers.losses.dppo import DPPOLoss
from fastrl.layers.losses.gmpo import GMPOLoss
from fastrl.layers.losses.policy_gradient import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.layers.losses.positive_nll import PositiveNLLLoss
from fastrl.layers.losses.reinforce import ReinforceLoss
from fastrl.layers.losses.sapo import SAPOLoss
from fastrl.layers.losses.squared_log_ratio import SquaredLogRatioLoss
from fastrl.layers.losses.vespo import VESPOLoss

__all__ = [
    "CISPOLoss",
    "ClipCovLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DPPOLoss",
    "DistillationLoss",
    "GMPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "GSPOTokenLoss",
    "KLCovLoss",
    "LUSPOLoss",
    "LanguageModelLoss",
    "LanguageModelPolicyGradientLoss",
    "PolicyTerms",
    "PositiveNLLLoss",
    "ReinforceLoss",
    "SAPOLoss",
    "SquaredLogRatioLoss",
    "VESPOLoss",
    "ZLoss",
    "add_metrics",
    "build_loss",
    "finish_metrics",
    "reduce_metrics",
]

_LOSSES: dict[str, type[LanguageModelLoss[Any]]] = {
    "cispo": CISPOLoss,
    "clip_cov": ClipCovLoss,
    "cross_entropy": CrossEntropyLoss,
    "distillation": DistillationLoss,
    "dpo": DPOLoss,
    "dppo": DPPOLoss,
    "gmpo": GMPOLoss,
    "grpo": GRPOLoss,
    "gspo": GSPOLoss,
    "gspo_token": GSPOTokenLoss,
    "kl_cov": KLCovLoss,
    "luspo": LUSPOLoss,
    "positive_nll": PositiveNLLLoss,
    "reinforce": ReinforceLoss,
    "sapo": SAPOLoss,
    "squared_log_ratio": SquaredLogRatioLoss,
    "vespo": VESPOLoss,
    "z_loss": ZLoss,
}


def build_loss(
    config: AnyLossConfig,
    token_groups: Sequence[ProcessGroup | None] = (),
    data_group: ProcessGroup | None = None,
) -> LanguageModelLoss[Any]:
    """The loss that `config` names by its `type`, with the arguments of `LanguageModelLoss`.

    Raises:
        ValueError: a `type` that is neither a name of the package's losses nor an import path.
    """
    loss_class = _LOSSES.get(config.type)
    if loss_class is None:
        loss_class = cast(type[LanguageModelLoss[Any]], user_loss(config.type))
    return loss_class(config, token_groups, data_group)
