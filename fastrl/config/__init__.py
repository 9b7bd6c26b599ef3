"""Every knob of fastrl, as frozen pydantic models. Imports no torch."""

from fastrl.config.base import Config, ConfigError, UserError
from fastrl.config.loading import dump_config, load_config, parse_config, save_config
from fastrl.config.losses import (
    AnyLossConfig,
    CrossEntropyLossConfig,
    GRPOLossConfig,
    GSPOLossConfig,
    HeadOptions,
    LanguageModelHeadConfig,
    LossConfig,
    PolicyGradientLossConfig,
)
from fastrl.config.model import LlamaConfig

__all__ = [
    "AnyLossConfig",
    "Config",
    "ConfigError",
    "CrossEntropyLossConfig",
    "GRPOLossConfig",
    "GSPOLossConfig",
    "HeadOptions",
    "LanguageModelHeadConfig",
    "LlamaConfig",
    "LossConfig",
    "PolicyGradientLossConfig",
    "UserError",
    "dump_config",
    "load_config",
    "parse_config",
    "save_config",
]
