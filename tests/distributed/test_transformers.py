"""A model of transformers with a head on two data ranks, under FSDP2 and DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fastrl import OptimizerStep
from fastrl.integrations.transformers import attach_head, detach_head
from fastrl.parallel import group_rank
from tests.helpers.hf_models import VOCAB_SIZE, tiny_model
from tests.helpers.own_logits import (
    gradients,
    own_logprobs,
    own_loss,
    some_batch,
    some_documents,
)
from tests.helpers.ranks import RankPool, parallel_groups, rank_mesh

LOSSES: dict[str, Any] = {"policy": {"type": "gspo", "epsilon_low": 0.3, "epsilon_high": 0.4}}


def _shard(model: Any, units: str) -> None:
    mesh = rank_mesh(2, 1, 1)["data"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if units == "head_apart":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)


def run_on_rank(units: str, tied: bool, attached_first: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The step's loss and gradients; the second rank has an empty micro-batch."""
    groups = parallel_groups(2, 1, 1)
    model = tiny_model("llama", tie_word_embeddings=tied)
    documents = some_documents(VOCAB_SIZE)
    mine = documents[:4] if group_rank(groups.dp) == 0 else documents[4:]
    step = OptimizerStep.from_documents(mine, max_tokens=14, groups=groups)
    called: Any = model
    if attached_first:
        head = attach_head(model, LOSSES, groups=groups)
    if units == "ddp":
        called = DistributedDataParallel(model)
    else:
        _shard(model, units)
    if not attached_first:
        head = attach_head(model, LOSSES, groups=groups)
        # As after `fully_shard`: an optimizer made now has the sharded parameters.
        assert all(isinstance(each, DTensor) for each in model.parameters())
    for batch in step:
        output = called(batch=batch)
        (2 * 1.7 * output.loss).backward()  # what averages over two ranks must add
        step.add(output)
    loss = step.finish(head.loss_groups)["loss"]
    detach_head(model)
    return loss, {name: _whole(each) for name, each in gradients(model).items()}


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


FSDP = [("whole", False), ("whole", True), ("head_apart", False)]
CASES = [
    *((units, tied, first) for units, tied in FSDP for first in (True, False)),
    ("ddp", True, True),
]


@pytest.mark.parametrize(("units", "tied", "attached_first"), CASES)
def test_a_step_is_that_of_one_process(
    ranks: RankPool, units: str, tied: bool, attached_first: bool
) -> None:
    results = ranks(run_on_rank, 2, units, tied, attached_first)
    model = tiny_model("llama", tie_word_embeddings=tied)
    batch = some_batch(VOCAB_SIZE)
    head = attach_head(model, LOSSES)
    expected = own_loss(head, own_logprobs(model, batch), batch)
    (1.7 * expected).backward()
    by_logits = gradients(model)
    for loss, found in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        assert found.keys() == by_logits.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, by_logits[name], rtol=0, atol=1e-9)
