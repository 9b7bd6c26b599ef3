"""Configs of the losses that treat tokens by their covariance of log-probability and advantage."""

from typing import Literal

from pydantic import Field, model_validator

from fastrl.config.loss_options import HIGHEST_RATIO
from fastrl.config.policy_losses import ClippedLossConfig, PolicyGradientLossConfig


class ClipCovLossConfig(ClippedLossConfig):
    """GRPO without the tokens of largest covariance (Clip-Cov, arXiv:2505.22617)."""

    type: Literal["clip_cov"] = "clip_cov"
    """Names the loss."""

    fraction: float = Field(default=2e-4, gt=0, le=1)
    """So many of the micro-batch's labels on all ranks, at least one, are left out: those of
    largest covariance (logp - mean)(A - mean) within the bounds; the paper's value."""

    covariance_low: float = Field(default=1.0, ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)
    """Only tokens of larger covariance are left out; the paper's value."""

    covariance_high: float = Field(default=5.0, ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)
    """Only tokens of smaller covariance are left out; the paper's value."""

    @model_validator(mode="after")
    def _bounds(self) -> "ClipCovLossConfig":
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"`covariance_low` must be below `covariance_high`, {self.covariance_high}, got"
                f" {self.covariance_low}"
            )
        return self


class KLCovLossConfig(PolicyGradientLossConfig):
    """A penalty on the tokens of largest covariance (KL-Cov, arXiv:2505.22617)."""

    type: Literal["kl_cov"] = "kl_cov"
    """Names the loss."""

    fraction: float = Field(default=2e-4, gt=0, le=1)
    """So many of the micro-batch's labels on all ranks, at least one, are penalised: those of
    largest covariance (logp - mean)(A - mean); the paper's value for a model of 32 B."""

    coefficient: float = Field(default=1.0, gt=0, le=HIGHEST_RATIO)
    """Factor on |logp - old| of these tokens; the paper's value."""

    @model_validator(mode="after")
    def _has_a_distance(self) -> "KLCovLossConfig":
        if self.on_policy:
            raise ValueError(
                "`on_policy` must not be given with `type: kl_cov`, whose penalty on |logp - old|"
                " is then 0; use `type: grpo`"
            )
        return self
