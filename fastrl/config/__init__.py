"""Every knob of fastrl, as frozen pydantic models. Imports no torch."""

from fastrl.config.base import Config, ConfigError, UserError

__all__ = ["Config", "ConfigError", "UserError"]
