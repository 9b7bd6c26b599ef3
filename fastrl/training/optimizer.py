"""AdamW, its learning-rate schedule and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fastrl.config.phases import OptimizerConfig
from fastrl.parallel import whole_tensor


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, with weight decay on matrices only."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, update: int, num_updates: int) -> float:
    """The learning rate of an update.

        warm-up, update < w:  lr (update + 1) / w
        after it, x = (update - w) / (num_updates - w), f = final_fraction:
            constant  lr
            linear    lr (1 - (1 - f) x)
            cosine    lr (f + (1 - f) (1 + cos(pi x)) / 2)

    Args:
        config: the schedule; w is `warmup_updates`.
        update: index in the phase, from 0.
        num_updates: of the phase.
    """
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    progress = (update - config.warmup_updates) / max(1, num_updates - config.warmup_updates)
    final = config.final_fraction
    match config.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1 - (1 - final) * progress
        case "cosine":
            factor = final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * factor


def apply_update(
    optimizer: torch.optim.AdamW, config: OptimizerConfig, update: int, num_updates: int
) -> Tensor:
    """Clips the gradients, applies update number `update` and clears them.

    Where their norm is not finite, weights, moments and step counts stay as they are. The norm is
    one over all shards and copies of them, so that all ranks leave out the same updates; the device
    decides, and the host does not wait for it.

    Returns:
        The norm of all gradients before clipping, a scalar on their device.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, update, num_updates)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    max_norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
    norm = whole_tensor(nn.utils.clip_grad_norm_(parameters, max_norm))
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]
    optimizer.zero_grad()
    return norm


def optimizer_state(
    optimizer: torch.optim.AdamW, names: Sequence[str]
) -> dict[str, dict[str, Tensor]]:
    """Moments, sharded as the parameter, and step of each parameter; not copies.

    Args:
        optimizer: from `build_optimizer`.
        names: of its parameters, in its order.
    """
    states = optimizer.state_dict()["state"]
    return {names[index]: dict(state) for index, state in states.items()}


def load_optimizer(
    optimizer: torch.optim.AdamW,
    names: Sequence[str],
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Loads the tensors of `optimizer_state`, sharded as the parameters are.

    The hyperparameters stay those of `optimizer`.
    """
    states = {index: dict(state[name]) for index, name in enumerate(names) if name in state}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
