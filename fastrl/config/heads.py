"""Configs of the heads beside the language-model head: a value head, draft heads."""

from typing import Literal

from pydantic import Field, model_validator

from fastrl.config.base import Config
from fastrl.config.loss_options import HIGHEST_RATIO, LossConfig
from fastrl.config.losses import CrossEntropyLossConfig, DistillationLossConfig


class ValueLossConfig(LossConfig):
    """Squared error of a value head to the returns, clipped around the old values as in PPO."""

    type: Literal["value"] = "value"
    """Names the loss."""

    epsilon: float | None = Field(default=0.2, gt=0, le=HIGHEST_RATIO)
    """How far a value may move from the old one before the clipped error takes its place where it
    is larger; null takes the plain error, which needs no old values."""

    @model_validator(mode="after")
    def _has_no_logits(self) -> "ValueLossConfig":
        if self.logits_scale != 1:
            raise ValueError(
                f"`logits_scale` must not be given to a value loss, which has no logits, got"
                f" {self.logits_scale}"
            )
        return self

    def required_columns(self) -> frozenset[str]:
        """The returns, and with a clip the old values."""
        names = {"returns"} | (set() if self.epsilon is None else {"values"})
        return super().required_columns() | names


class DraftConfig(Config):
    """Heads of depth 1 to `depth` that predict tokens further on, on the head's own weight."""

    depth: int = Field(gt=0, le=64)
    """Number K of draft heads; the one of depth k predicts the label that is k places further
    on than the head's own."""

    loss: CrossEntropyLossConfig | DistillationLossConfig = Field(
        default_factory=lambda: CrossEntropyLossConfig(weight=0.3), discriminator="type"
    )
    """Of each depth: `cross_entropy` to its labels, or `distillation` from the head's own
    distribution of the same token. Its `weight` is shared evenly among the depths."""

    detach_weight: bool = False
    """Whether the draft heads leave the weight (and bias) without gradient: they train what makes
    their hidden states alone."""

    @model_validator(mode="after")
    def _teacher_is_the_head(self) -> "DraftConfig":
        if isinstance(self.loss, DistillationLossConfig) and self.loss.recorded:
            raise ValueError(
                "`loss.recorded` must not be given to draft heads, whose teacher is the head they"
                " belong to; leave it out"
            )
        return self
