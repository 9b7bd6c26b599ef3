"""Every knob of fastrl, as frozen pydantic models. Imports no torch."""

from fastrl.config.base import Config, ConfigError, UserError
from fastrl.config.corrections import CorrectionConfig
from fastrl.config.covariance_losses import ClipCovLossConfig, KLCovLossConfig
from fastrl.config.heads import DraftConfig, ValueLossConfig
from fastrl.config.loading import dump_config, load_config, parse_config, save_config
from fastrl.config.loss_options import (
    AdaptiveEntropyConfig,
    AdaptiveKLConfig,
    EntropyConfig,
    KLConfig,
    LossConfig,
    OffPolicyMaskConfig,
    OnPolicyDistillationConfig,
    ProximalConfig,
    RolloutCorrectionConfig,
)
from fastrl.config.losses import (
    AnyLossConfig,
    CrossEntropyLossConfig,
    DistillationLossConfig,
    DPOLossConfig,
    HeadOptions,
    KeepSetConfig,
    LanguageModelHeadConfig,
    PositiveNLLLossConfig,
    SquaredLogRatioLossConfig,
    ZLossConfig,
)
from fastrl.config.model import LlamaConfig
from fastrl.config.policy_losses import (
    CISPOLossConfig,
    ClippedLossConfig,
    DPPOLossConfig,
    GMPOLossConfig,
    GRPOLossConfig,
    GSPOLossConfig,
    GSPOTokenLossConfig,
    LUSPOLossConfig,
    PolicyGradientLossConfig,
    ReinforceLossConfig,
    SAPOLossConfig,
    VESPOLossConfig,
)
from fastrl.config.training import RunConfig

__all__ = [
    "AdaptiveEntropyConfig",
    "AdaptiveKLConfig",
    "AnyLossConfig",
    "CISPOLossConfig",
    "ClipCovLossConfig",
    "ClippedLossConfig",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "CrossEntropyLossConfig",
    "DPOLossConfig",
    "DPPOLossConfig",
    "DistillationLossConfig",
    "DraftConfig",
    "EntropyConfig",
    "GMPOLossConfig",
    "GRPOLossConfig",
    "GSPOLossConfig",
    "GSPOTokenLossConfig",
    "HeadOptions",
    "KLConfig",
    "KLCovLossConfig",
    "KeepSetConfig",
    "LUSPOLossConfig",
    "LanguageModelHeadConfig",
    "LlamaConfig",
    "LossConfig",
    "OffPolicyMaskConfig",
    "OnPolicyDistillationConfig",
    "PolicyGradientLossConfig",
    "PositiveNLLLossConfig",
    "ProximalConfig",
    "ReinforceLossConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SAPOLossConfig",
    "SquaredLogRatioLossConfig",
    "UserError",
    "VESPOLossConfig",
    "ValueLossConfig",
    "ZLossConfig",
    "dump_config",
    "load_config",
    "parse_config",
    "save_config",
]
