"""The value head and draft heads over data, sequence-data and tensor ranks, against one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastrl import DraftHeads, LanguageModelHead, OptimizerStep, TokenBatch, ValueHead
from fastrl.config import DraftConfig, LanguageModelHeadConfig
from fastrl.data.slices import shard_slots
from fastrl.parallel import ParallelGroups, group_rank, group_size, sum_over_ranks_, vocab_shard
from tests.helpers.collectives import CollectiveRecord
from tests.helpers.layouts import Ranks
from tests.helpers.loss_heads import HIDDEN_SIZE, capped_head
from tests.helpers.ranks import RankPool, rank_mesh
from tests.helpers.side_heads import hidden_of, packed_hidden, step_documents

DEPTH = 2
MAIN = {"policy": {"type": "grpo"}}
LOSSES: list[dict[str, Any]] = [
    {"type": "cross_entropy", "weight": 0.3, "normalisation": "documents"},
    {"type": "distillation", "divergence": "reverse_kl"},
]
LAYOUTS = [
    Ranks(tensor=2),
    Ranks(tensor=2, sequence_parallel=True, vocabulary_parallel=False),
    Ranks(2, 2, 2, True, True, "zigzag"),
]


@dataclass(frozen=True)
class Result:
    """Of one rank, or of one process; hidden states' gradients by depth."""

    loss: Tensor
    values: Tensor
    grads: list[Tensor]
    weights: list[Tensor]  # gradients of the head's, of the value head's
    metrics: dict[str, Tensor]


def run(head: LanguageModelHead, loss: dict[str, Any], step: OptimizerStep, hidden: Any) -> Result:
    """The heads of one rank; `hidden(depth, length)` are its hidden states."""
    heads = DraftHeads(head, DraftConfig.model_validate({"depth": DEPTH, "loss": loss}))
    value_head = ValueHead(HIDDEN_SIZE, groups=head.groups, dtype=torch.float64)
    with torch.no_grad():
        value_head.weight.normal_(generator=torch.Generator().manual_seed(5))
    ((batch, *drafts),) = zip(step, step.draft(1), step.draft(2), strict=True)
    states = [
        hidden(depth, batch.num_tokens).clone().requires_grad_() for depth in range(DEPTH + 1)
    ]
    output = heads(states[0], batch, list(zip(states[1:], drafts, strict=True)))
    value = value_head(states[0], batch)
    total = output.loss + value.loss
    (0.7 * total).backward()
    output.metrics.update(value.metrics)
    step.add(output)
    parameters = [*heads.parameters(), value_head.weight]
    return Result(
        total.detach(),
        value.values,
        [each.grad for each in states if each.grad is not None],
        [each.grad for each in parameters if each.grad is not None],
        step.finish(head.loss_groups),
    )


@cache
def one_process(number: int) -> Result:
    documents = step_documents()
    states = [hidden_of(documents, 10 + depth) for depth in range(DEPTH + 1)]
    step = OptimizerStep([TokenBatch.from_documents(documents)])
    return run(
        capped_head(MAIN), LOSSES[number], step, lambda depth, _: packed_hidden(states[depth], 0)
    )


def sharded_head(layout: Ranks, groups: ParallelGroups) -> LanguageModelHead:
    whole = capped_head(MAIN)
    options = whole.config.model_dump() | {"vocabulary_parallel": layout.vocabulary_parallel}
    config = LanguageModelHeadConfig.model_validate(options)
    head = LanguageModelHead(config, groups, dtype=torch.float64)
    with torch.no_grad():
        for own, every in zip(head.parameters(), whole.parameters(), strict=True):
            own.copy_(every[local_rows(head)])
    return head


def local_rows(head: LanguageModelHead) -> slice:
    tp = head.groups.tp
    return slice(*vocab_shard(head.weight_rows, group_rank(tp), group_size(tp)))


def check_on_rank(number: int, layout: Ranks) -> None:
    """This rank's part equals that of one process."""
    groups = layout.groups()
    head = sharded_head(layout, groups)
    documents = step_documents()
    numbers = list(range(len(documents)))[group_rank(groups.dp) :: group_size(groups.dp)]
    batch = TokenBatch.from_documents([documents[index] for index in numbers])
    step = OptimizerStep([batch], groups, layout=layout.layout)
    lengths = [len(document.tokens) for document in documents]

    def local(parts: list[Tensor], length: int, fill: bool, *, split: bool = True) -> Tensor:
        size, rank = group_size(groups.sdp), group_rank(groups.sdp)
        packed = packed_hidden([parts[index] for index in numbers], length * size)
        packed[batch.num_tokens :] *= fill
        slots = shard_slots(length * size, rank=rank, size=size, layout=layout.layout)[0]
        own = packed[slots]
        return own.chunk(group_size(groups.sp))[group_rank(groups.sp)] if split else own

    states = [hidden_of(documents, 10 + depth) for depth in range(DEPTH + 1)]
    found = run(
        head, LOSSES[number], step, lambda depth, length: local(states[depth], length, True)
    )
    expected = one_process(number)
    for grad, wanted in zip(found.grads, expected.grads, strict=True):
        length = len(found.values)
        close(grad, local(list(wanted.split(lengths)), length, False))
    values = [each[:, None].expand(-1, HIDDEN_SIZE) for each in expected.values.split(lengths)]
    close(found.values, local(values, len(found.values), False, split=False)[:, 0])
    loss = found.loss.clone()
    sum_over_ranks_(loss, head.loss_groups)
    close(loss, expected.loss)
    rows = [local_rows(head)] * 2 + [slice(None)]
    for grad, wanted, part in zip(found.weights, expected.weights, rows, strict=True):
        sum_over_ranks_(grad, (groups.dp, groups.sdp))
        close(grad, wanted[part])
    assert found.metrics.keys() == expected.metrics.keys()
    for name, metric in found.metrics.items():
        close(metric.double(), expected.metrics[name].double(), name)


def close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    where = f"{name}: {{}}"
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10, msg=where.format)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_every_rank_has_its_part(ranks: RankPool, number: int, layout: Ranks) -> None:
    ranks(check_on_rank, layout.world_size, number, layout)


def check_fully_sharded() -> int:
    """Collectives of a forward under FSDP2; the weight's gradient equals that of one process."""
    groups = Ranks(data=2).groups()
    documents = step_documents()
    numbers = list(range(len(documents)))[group_rank(groups.dp) :: 2]
    batch = TokenBatch.from_documents([documents[index] for index in numbers])
    step = OptimizerStep([batch], groups)
    heads = DraftHeads(
        sharded_head(Ranks(), groups),
        DraftConfig.model_validate({"depth": DEPTH, "loss": LOSSES[0]}),
    )
    wrapped = fully_shard(heads, mesh=rank_mesh(2, 1, 1)["data"])
    wrapped.set_gradient_divide_factor(1.0)
    wrapped.set_force_sum_reduction_for_comms(True)
    states = [
        packed_hidden([hidden_of(documents, 10 + depth)[index] for index in numbers], 0)
        for depth in range(DEPTH + 1)
    ]
    ((own, *drafts),) = zip(step, step.draft(1), step.draft(2), strict=True)
    with CollectiveRecord() as record:
        output = heads(states[0].requires_grad_(), own, list(zip(states[1:], drafts, strict=True)))
    (0.7 * output.loss).backward()
    grad = heads.head.weight.grad
    assert isinstance(grad, DTensor)
    close(grad.full_tensor(), one_process(0).weights[0])
    return len(record.calls)


def test_fsdp_gathers_the_weight_of_all_heads_once(ranks: RankPool) -> None:
    assert ranks(check_fully_sharded, 2) == [1, 1]
