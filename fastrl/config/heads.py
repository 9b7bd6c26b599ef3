"""Configs of the heads beside the language-model head: a value head."""

from typing import Literal

from pydantic import Field, model_validator

from fastrl.config.loss_options import HIGHEST_RATIO, LossConfig


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
