"""Rotary position embedding of the reference Llama, and how its wavelengths are scaled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fastrl.config.base import Config


class DefaultRopeConfig(Config):
    """Rotary position embedding without scaling."""

    type: Literal["default"] = "default"

    theta: float = Field(default=10000.0, gt=0)
    """Base of the wavelengths: pair i of a head's dimensions turns by
    position * theta^(-2 i / head_dim)."""


class Llama3RopeConfig(Config):
    """Rotary position embedding with the frequency scaling of Llama 3.1 and later.

    Wavelengths (in tokens) under original_max_position_embeddings / high_freq_factor stay, those
    over original_max_position_embeddings / low_freq_factor are multiplied by `factor`, and the
    frequency is interpolated between the two.
    """

    type: Literal["llama3"] = "llama3"

    theta: float = Field(default=500000.0, gt=0)
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


RopeConfig = Annotated[DefaultRopeConfig | Llama3RopeConfig, Field(discriminator="type")]
