"""Training on every layout of ranks equals training in one process: losses, gradients, weights."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.helpers.same_training import assert_same_training, in_one_process, train_in_one_process
from tests.helpers.sharded_training import VARIANTS, train

CONFIG_NAMES = ["llama_grpo", "llama_gspo"]


@pytest.mark.parametrize("config_name", CONFIG_NAMES)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "simple"])
def test_three_steps_equal_those_of_one_process(
    ranks: RankPool, config_name: str, name: str
) -> None:
    variant = VARIANTS[name]
    actual = ranks(train, variant.ranks.world_size, config_name, variant)[0]
    assert_same_training(
        variant, actual, train_in_one_process(config_name, in_one_process(variant))
    )


@pytest.mark.parametrize("config_name", CONFIG_NAMES)
def test_the_case_has_something_to_compare(config_name: str) -> None:
    """Clipped and unclipped ratios, gradients in every parameter, weights that move."""
    training = train_in_one_process(config_name, VARIANTS["simple"])
    assert 0.05 < training.metrics[0]["policy/clip_fraction"] < 0.9
    for grads in training.grads:
        assert all(grad.norm() > 1e-4 for grad in grads.values())
    assert all(torch.isfinite(weight).all() for weight in training.weights.values())
