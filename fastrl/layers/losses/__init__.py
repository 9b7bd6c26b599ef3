"""The losses of the head: small functions of per-token statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup

from fastrl.config.losses import (
    AnyLossConfig,
    CrossEntropyLossConfig,
    GRPOLossConfig,
    GSPOLossConfig,
)
from fastrl.layers.losses.base import LanguageModelLoss
from fastrl.layers.losses.cross_entropy import CrossEntropyLoss
from fastrl.layers.losses.metrics import add_metrics, reduce_metrics
from fastrl.layers.losses.policy_gradient import (
    GRPOLoss,
    GSPOLoss,
    LanguageModelPolicyGradientLoss,
)

__all__ = [
    "CrossEntropyLoss",
    "GRPOLoss",
    "GSPOLoss",
    "LanguageModelLoss",
    "LanguageModelPolicyGradientLoss",
    "add_metrics",
    "build_loss",
    "reduce_metrics",
]


def build_loss(
    config: AnyLossConfig, token_groups: Sequence[ProcessGroup | None] = ()
) -> LanguageModelLoss[Any]:
    """The loss that `config` names; `token_groups` may share a document's tokens."""
    match config:
        case CrossEntropyLossConfig():
            return CrossEntropyLoss(config, token_groups)
        case GRPOLossConfig():
            return GRPOLoss(config, token_groups)
        case GSPOLossConfig():
            return GSPOLoss(config, token_groups)
