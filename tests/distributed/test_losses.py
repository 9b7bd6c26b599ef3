"""Every loss and option of the shared list, over ranks that share documents and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fastrl import BatchKwargs, Document, LanguageModelHead, TokenBatch
from fastrl.config import LanguageModelHeadConfig
from fastrl.data.advantages import with_group_advantages
from fastrl.data.reward_kl import with_kl_in_rewards, with_kl_to_go
from fastrl.data.slices import shard_slots
from fastrl.data.token_sampling import with_sampled_tokens
from fastrl.functional.head.distillation import Teacher
from fastrl.layers.losses import reduce_metrics
from fastrl.parallel import ParallelGroups, group_rank, group_size, vocab_shard
from tests.helpers.layouts import Ranks
from tests.helpers.loss_cases import BOTH_POLICIES, BY_NAME, CASES, LossCase
from tests.helpers.loss_documents import policy_documents, widen, with_weights
from tests.helpers.loss_heads import (
    capped_head,
    close_to_policy,
    make_teacher,
    random_hidden,
)
from tests.helpers.ranks import RankPool

PAD_TO_MULTIPLE = 16
# Of reference and sampler from the policy.
SHIFTS = {"ref_logprobs": 0.2, "rollout_logprobs": -0.05}
LAYOUTS = [
    Ranks(sequence_data=2, layout="zigzag"),
    Ranks(tensor=2, sequence_parallel=True, vocabulary_parallel=False),
    Ranks(sequence_data=2, tensor=2, sequence_parallel=True, layout="zigzag"),
]


@dataclass(frozen=True)
class Result:
    """Of one rank, or of all."""

    loss: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor
    grad_bias: Tensor
    metrics: dict[str, Tensor]


# Half of its labels are drawn.
DRAWN = LossCase("drawn", {"type": "grpo", "entropy": {"bonus": 0.1}})
# Its advantages are of rewards that pay for the KL, and pay for it token by token themselves.
PAID = LossCase("paid", {"type": "grpo"})


def token_batch(case: LossCase) -> TokenBatch:
    batch = case.packed(PAD_TO_MULTIPLE)
    if case == PAID:
        documents = with_group_advantages(with_kl_in_rewards(case.documents(), 0.2))
        documents = with_kl_to_go(documents, 0.1, estimator="k3")
        batch = TokenBatch.from_documents(documents, pad_to_multiple=PAD_TO_MULTIPLE)
    return with_sampled_tokens(batch, 0.5, seed=3) if case == DRAWN else batch


def whole_batch(case: LossCase) -> tuple[BatchKwargs, Tensor]:
    """The batch of one process, its old policies near the head's, and the hidden states."""
    batch = widen(token_batch(case).to_kwargs()[0])
    hidden = random_hidden(batch)
    return close_to_policy(capped_head({}), hidden, batch), hidden


def run(
    head: LanguageModelHead, hidden: Tensor, batch: BatchKwargs, teacher: Teacher | None
) -> Result:
    with_teacher = any(
        "divergence" in loss.needs and not loss.config.recorded for loss in head.losses.values()
    )
    hidden = hidden.clone().requires_grad_()
    output = head(hidden, batch, teacher=teacher if with_teacher else None)
    (0.7 * output.loss).backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert head.bias is not None
    assert head.bias.grad is not None
    return Result(
        output.loss.detach(),
        hidden.grad,
        head.weight.grad,
        head.bias.grad,
        reduce_metrics(output.metrics, head.loss_groups),
    )


@cache
def one_process(case: LossCase) -> Result:
    batch, hidden = whole_batch(case)
    head = capped_head({"loss": dict(case.config)})
    return run(head, hidden, batch, make_teacher(batch))


def sharded_head(case: LossCase, layout: Ranks, groups: ParallelGroups) -> LanguageModelHead:
    """The head of `capped_head` with this rank's rows."""
    whole = capped_head({"loss": dict(case.config)})
    options = whole.config.model_dump() | {"vocabulary_parallel": layout.vocabulary_parallel}
    config = LanguageModelHeadConfig.model_validate(options)
    head = LanguageModelHead(config, groups, dtype=torch.float64)
    rows = local_rows(head)
    assert head.bias is not None
    assert whole.bias is not None
    with torch.no_grad():
        head.weight.copy_(whole.weight[rows])
        head.bias.copy_(whole.bias[rows])
    return head


def local_rows(head: LanguageModelHead) -> slice:
    tp = head.groups.tp
    return slice(*vocab_shard(head.weight_rows, group_rank(tp), group_size(tp)))


def run_on_rank(names: list[str], layout: Ranks) -> list[Result]:
    return [run_case(BY_NAME[name], layout) for name in names]


def run_case(case: LossCase, layout: Ranks) -> Result:
    groups = layout.groups()
    whole, hidden = whole_batch(case)
    (batch,) = token_batch(case).to_kwargs(groups, layout=layout.layout)
    slots = local_slots(whole.num_tokens, group_rank(groups.sdp), layout)
    vectors = {
        name: getattr(whole, name)[slots]
        for name in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    batch = widen(batch).replace(**vectors)

    def local(states: Tensor) -> Tensor:
        return states[slots].chunk(group_size(groups.sp))[group_rank(groups.sp)]

    head = sharded_head(case, layout, groups)
    teacher = make_teacher(whole)
    assert teacher.bias is not None
    rows = local_rows(head)
    teacher = replace(
        teacher,
        hidden_states=local(teacher.hidden_states),
        weight=teacher.weight[rows],
        bias=teacher.bias[rows],
    )
    return run(head, local(hidden), batch, teacher)


def run_both_policies(layout: Ranks) -> None:
    """On each rank: a pass that is its own old policy equals one after a pass of its own."""
    groups = layout.groups()
    documents = with_weights(policy_documents())
    packed = TokenBatch.from_documents(documents, pad_to_multiple=PAD_TO_MULTIPLE)
    whole = widen(packed.to_kwargs()[0])
    (batch,) = packed.to_kwargs(groups, layout=layout.layout)
    slots = local_slots(whole.num_tokens, group_rank(groups.sdp), layout)
    hidden = random_hidden(whole)[slots].chunk(group_size(groups.sp))[group_rank(groups.sp)]
    for with_column, alone in BOTH_POLICIES:
        head = sharded_head(with_column, layout, groups)
        head.eval()
        with torch.no_grad():
            old = head(hidden, batch).logprobs
        head.train()
        near = {name: (old + shift).clamp(max=-1e-3) for name, shift in SHIFTS.items()}
        both = widen(batch).replace(**near, old_logprobs=old)
        expected = run(head, hidden, both, None)
        own = sharded_head(alone, layout, groups)
        actual = run(own, hidden, both.replace(old_logprobs=None), None)
        assert_equal(alone.name, actual, expected, 1e-12)


def local_slots(length: int, rank: int, layout: Ranks) -> Tensor:
    return shard_slots(length, rank=rank, size=layout.sequence_data, layout=layout.layout)[0]


def assemble(layout: Ranks, results: list[Result]) -> Result:
    at = {layout.coordinates(rank)[1:]: result for rank, result in enumerate(results)}
    tensor = range(layout.tensor)
    losses, hidden, weights, biases = [], [], [], []
    for s in range(layout.sequence_data):
        parts = [at[s, t] for t in tensor]
        losses += [part.loss for part in (parts if layout.head_splits_tokens else parts[:1])]
        hidden.append(
            torch.cat([part.grad_hidden for part in parts])
            if layout.sequence_parallel
            else parts[0].grad_hidden
        )
        shards = parts if layout.vocabulary_parallel else parts[:1]
        weights.append(torch.cat([part.grad_weight for part in shards]))
        biases.append(torch.cat([part.grad_bias for part in shards]))
    length = sum(len(part) for part in hidden)
    packed = torch.empty(length, hidden[0].shape[1], dtype=torch.float64)
    for s, part in enumerate(hidden):
        packed[local_slots(length, s, layout)] = part
    return Result(
        torch.stack(losses).sum(),
        packed,
        torch.stack(weights).sum(0),
        torch.stack(biases).sum(0),
        results[0].metrics,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_loss_is_that_of_one_process(ranks: RankPool, layout: Ranks) -> None:
    names = [case.name for case in CASES]
    answers = ranks(run_on_rank, layout.world_size, names, layout)
    for name, results in zip(names, zip(*answers, strict=True), strict=True):
        actual, expected = assemble(layout, list(results)), one_process(BY_NAME[name])
        assert_equal(name, actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_drawn_labels_and_paid_advantages_are_those_of_one_process(
    ranks: RankPool, layout: Ranks
) -> None:
    for case in (DRAWN, PAID):
        results = ranks(run_case, layout.world_size, case, layout)
        assert_equal(case.name, assemble(layout, results), one_process(case))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_policy_is_its_own_old_one_on_ranks_too(ranks: RankPool, layout: Ranks) -> None:
    ranks(run_both_policies, layout.world_size, layout)


def assert_equal(name: str, actual: Result, expected: Result, tolerance: float = 1e-10) -> None:
    assert actual.metrics.keys() == expected.metrics.keys(), name
    pairs = {
        field: (getattr(actual, field), getattr(expected, field))
        for field in ("loss", "grad_hidden", "grad_weight", "grad_bias")
    } | {key: (value, expected.metrics[key]) for key, value in actual.metrics.items()}
    for field, (a, b) in pairs.items():
        where = f"{name}: {field}: {{}}"
        torch.testing.assert_close(
            a.double(), b.double(), rtol=tolerance, atol=tolerance, msg=where.format
        )


def dealt(case: LossCase, rank: int) -> tuple[list[Document], Tensor]:
    """The documents of every second group, and their slots in the packed sequence of all."""
    documents = case.documents()
    groups = sorted({document.group_id for document in documents}, key=str)
    mine = set(groups[rank::2])
    slots: list[int] = []
    start = 0
    for document in documents:
        stop = start + len(document.tokens)
        slots += range(start, stop) if document.group_id in mine else []
        start = stop
    return [document for document in documents if document.group_id in mine], torch.tensor(slots)


def run_on_data_rank(names: list[str]) -> list[Result]:
    return [run_data_case(BY_NAME[name]) for name in names]


def run_data_case(case: LossCase) -> Result:
    layout = Ranks(data=2)
    groups = layout.groups()
    whole, hidden = whole_batch(case)
    documents, slots = dealt(case, group_rank(groups.dp))
    columns = (
        *("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "model_version"),
        *case.columns,
    )
    batch = TokenBatch.from_documents(documents, columns=columns)
    kwargs = widen(batch.to_kwargs(groups)[0])
    kwargs = kwargs.replace(**{name: getattr(whole, name)[slots] for name in columns})
    teacher = make_teacher(whole)
    teacher = replace(teacher, hidden_states=teacher.hidden_states[slots])
    return run(sharded_head(case, layout, groups), hidden[slots], kwargs, teacher)


def test_every_loss_over_data_ranks_with_other_documents(ranks: RankPool) -> None:
    names = [case.name for case in CASES]
    answers = ranks(run_on_data_rank, 2, names)
    for name, results in zip(names, zip(*answers, strict=True), strict=True):
        expected = one_process(BY_NAME[name])
        slots = torch.cat([dealt(BY_NAME[name], rank)[1] for rank in range(2)])
        grad_hidden = torch.zeros_like(expected.grad_hidden)
        grad_hidden[slots] = torch.cat([result.grad_hidden for result in results])
        first, second = results
        actual = Result(
            first.loss + second.loss,
            grad_hidden,
            first.grad_weight + second.grad_weight,
            first.grad_bias + second.grad_bias,
            first.metrics,
        )
        assert_equal(name, actual, expected)
