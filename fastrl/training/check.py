"""What a run refuses before it begins, without making its model or a folder."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack

from fastrl.config.base import UserError
from fastrl.config.training import LoggingConfig, RunConfig
from fastrl.training.context import build_context
from fastrl.training.rollout_sources import build_sources


def check_run(config: RunConfig) -> None:
    """Refuses what `train` would refuse on this machine, but for the tensors of weights.

    Device, packages, tokenizer, problems, prompts, rollout files to their end, the model's sizes
    and how they are split. The number of processes is not looked at.

    Raises:
        UserError: as `train`.
    """
    check_packages(config.logging)
    with ExitStack() as stack:
        context = build_context(config, with_weights=False)
        if context.environment is not None:
            stack.callback(context.environment.close)
        try:
            context.model.check_tensor_axis(config.parallel.tensor)
        except ValueError as error:
            raise UserError(f"`parallel`: {error}") from error
        build_sources(config, context)


def check_packages(config: LoggingConfig) -> None:
    """Refuses outputs whose packages are not installed."""
    packages = {
        "tensorboard": ("tensorboard", "'fastrl[examples]'"),
        "report": ("matplotlib", "'fastrl[examples]'"),
        "wandb": ("wandb", "wandb"),
        "trackio": ("trackio", "trackio"),
    }
    for option, (package, installed_by) in packages.items():
        if getattr(config, option) and importlib.util.find_spec(package) is None:
            raise UserError(
                f"`logging.{option}` needs the {package} package; install it with: "
                f"pip install {installed_by}, or set it to false"
            )
