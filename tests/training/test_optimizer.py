"""AdamW, its schedule and clipping."""

from typing import Any

import pytest
import torch
from torch import nn

from fastrl.config.phases import OptimizerConfig
from fastrl.training.optimizer import apply_update, build_optimizer, learning_rate


def _config(**values: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_updates": 4}, [0.25, 0.5, 0.75, 1, 1]),
        ({"schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "warmup_updates": 1, "final_fraction": 0.2}, [1, 1, 0.8, 0.6, 0.4]),
        ({"schedule": "cosine", "warmup_updates": 1}, [1, 1, 0.853553, 0.5, 0.146447]),
        ({"schedule": "cosine", "warmup_updates": 9}, [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9]),
    ],
)
def test_the_schedule(values: dict[str, Any], expected: list[float]) -> None:
    config = _config(learning_rate=0.5, **values)
    rates = [learning_rate(config, update, 5) for update in range(5)]
    assert rates == pytest.approx([0.5 * factor for factor in expected], abs=1e-6)


def _module() -> nn.Linear:
    module = nn.Linear(3, 2, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    return module


@pytest.mark.parametrize("max_norm", [None, 1.0, 100.0])
def test_gradients_are_clipped_by_their_norm_over_all(max_norm: float | None) -> None:
    module = _module()
    config = _config(max_grad_norm=max_norm)
    optimizer = build_optimizer(module, config)
    norm = apply_update(optimizer, config, 0, 1)
    assert float(norm) == pytest.approx((8 * 4) ** 0.5)
    factor = 1 / float(norm) if max_norm == 1.0 else 1.0
    for parameter in module.parameters():
        assert parameter.grad is None
        mean = optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(mean, torch.full_like(mean, 0.1 * 2 * factor))


def test_only_matrices_decay_and_the_step_is_adamws() -> None:
    module = _module()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    config = _config(learning_rate=0.01, weight_decay=0.1, max_grad_norm=None)
    apply_update(build_optimizer(module, config), config, 0, 1)
    # The first step of Adam is the learning rate in the direction of the sign.
    torch.testing.assert_close(module.weight, before["weight"] * (1 - 0.001) - 0.01)
    torch.testing.assert_close(module.bias, before["bias"] - 0.01)
