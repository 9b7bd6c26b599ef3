"""A gradient of one tensor rank that is not finite: all ranks leave out the update."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl.config.phases import OptimizerConfig
from fastrl.models.llama import Llama
from fastrl.models.parallelize import parallelize_llama, reduce_gradients
from fastrl.parallel import group_rank
from fastrl.training.optimizer import apply_update, build_optimizer
from tests.helpers.ranks import RankPool, rank_mesh
from tests.helpers.sharded_training import VARIANTS, documents, forward_backward, variant_config

OPTIMIZER = OptimizerConfig(learning_rate=0.1, weight_decay=0.1)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def changed_by_bad_gradients(variant_name: str, bad: float) -> list[str]:
    """On a rank: what an update changed, though one number of the last tensor rank was `bad`.

    The number is in each of the parameters once: those split over the ranks and those that each
    rank has a copy of.
    """
    variant = VARIANTS[variant_name]
    torch.manual_seed(11)
    llama = Llama(variant_config("llama_grpo", variant), dtype=torch.float32)
    layout = variant.ranks
    mesh = rank_mesh(layout.data, layout.sequence_data, layout.tensor)
    groups = parallelize_llama(llama, mesh, sequence_parallel=layout.sequence_parallel)
    optimizer = build_optimizer(llama, OPTIMIZER)

    forward_backward(llama, documents(0), variant, groups)
    gradients = {name: gradient_of(parameter) for name, parameter in llama.named_parameters()}

    def update(number: int, poisoned: Tensor | None) -> Tensor:
        for name, parameter in llama.named_parameters():
            parameter.grad = gradients[name].clone()
        if poisoned is not None and group_rank(groups.tp) == layout.tensor - 1:
            with torch.no_grad():
                local(gradient_of(poisoned)).view(-1)[-1] = bad
        reduce_gradients(llama)
        return apply_update(optimizer, OPTIMIZER, number, 100)

    def everything() -> dict[str, Tensor]:
        values = dict(llama.named_parameters())
        for name, parameter in llama.named_parameters():
            values |= {f"{name}.{key}": part for key, part in optimizer.state[parameter].items()}
        return {name: local(value).detach().clone() for name, value in values.items()}

    update(0, None)
    before, wrong = everything(), []
    for number, (name, parameter) in enumerate(llama.named_parameters()):
        if update(1 + number, parameter).isfinite():
            wrong.append(f"the norm with {name}")
        after = everything()
        wrong += [
            f"{key} with {name}" for key in before if not torch.equal(before[key], after[key])
        ]
    assert update(100 - 1, None).isfinite()
    after = everything()
    return wrong + [f"{key} stays" for key in before if torch.equal(before[key], after[key])]


@pytest.mark.parametrize(
    ("variant", "bad"),
    [("tp2", math.nan), ("stp2", math.inf), ("tied_stp2_novp", math.nan), ("sdp2_tp2", math.nan)],
)
def test_rl28_a_bad_gradient_of_one_tensor_rank_changes_nothing_on_any(
    ranks: RankPool, variant: str, bad: float
) -> None:
    size = VARIANTS[variant].ranks.world_size
    assert ranks(changed_by_bad_gradients, size, variant, bad) == [[]] * size
