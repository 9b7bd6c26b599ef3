"""Rotary position embedding of the reference Llama, and how its wavelengths are scaled."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fastrl.config.base import Config


class DefaultRopeConfig(Config):
    """Rotary position embedding without scaling."""

    type: Literal["default"] = "default"

    theta: float = Field(default=10000.0, ge=1, le=1e18)
    """Base of the wavelengths: pair i of a head's dimensions turns by
    position * theta^(-2 i / head_dim)."""


class Llama3RopeConfig(Config):
    """Rotary position embedding with the frequency scaling of Llama 3.1 and later.

    Wavelengths (in tokens) under original_max_position_embeddings / high_freq_factor stay, those
    over original_max_position_embeddings / low_freq_factor are multiplied by `factor`, and the
    frequency is interpolated between the two.
    """

    type: Literal["llama3"] = "llama3"

    theta: float = Field(default=500000.0, ge=1, le=1e18)
    """Base of the wavelengths."""

    factor: float = Field(default=8.0, ge=1)
    """What long wavelengths are multiplied by."""

    low_freq_factor: float = Field(default=1.0, gt=0)
    """Sets the wavelength from which the whole factor applies."""

    high_freq_factor: float = Field(default=4.0, gt=0)
    """Sets the wavelength up to which nothing changes."""

    original_max_position_embeddings: int = Field(default=8192, gt=0)
    """Context length of the model before its context was extended."""

    @model_validator(mode="after")
    def _check_factors(self) -> Llama3RopeConfig:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"`high_freq_factor` must be over `low_freq_factor`, got {self.high_freq_factor} "
                f"and {self.low_freq_factor}"
            )
        return self


class YarnRopeConfig(Config):
    """Rotary position embedding with YaRN's scaling of frequencies and of attention.

    Pairs that turn more than `beta_fast` times in the original context stay, those that turn less
    than `beta_slow` times are slowed by `factor`, and between them the share rises evenly with the
    pair's number.

    References:
        YaRN: Efficient Context Window Extension of Large Language Models, arXiv 2309.00071.
    """

    type: Literal["yarn"] = "yarn"

    theta: float = Field(default=10000.0, gt=1, le=1e18)
    """Base of the wavelengths."""

    factor: float = Field(default=4.0, ge=1)
    """What long wavelengths are multiplied by."""

    original_max_position_embeddings: int = Field(default=32768, gt=0)
    """Context length of the model before its context was extended."""

    attention_factor: float = Field(
        default_factory=lambda config: 0.1 * math.log(config["factor"]) + 1, gt=0
    )
    """What queries and keys are multiplied by. Default: 0.1 ln(factor) + 1."""

    beta_fast: float = Field(default=32.0, gt=0)
    """Turns in the original context above which a pair stays."""

    beta_slow: float = Field(default=1.0, gt=0)
    """Turns in the original context below which the whole factor applies."""

    truncate: bool = True
    """Whether both ends of the range between are rounded to whole pairs, away from each other."""

    @model_validator(mode="after")
    def _check_turns(self) -> YarnRopeConfig:
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"`beta_fast` must be over `beta_slow`, got {self.beta_fast} and {self.beta_slow}"
            )
        return self


RopeConfig = Annotated[
    DefaultRopeConfig | Llama3RopeConfig | YarnRopeConfig, Field(discriminator="type")
]
