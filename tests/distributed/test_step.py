"""An optimizer step over data ranks with unequal documents is the step of one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import (
    Document,
    LanguageModelHead,
    LanguageModelHeadConfig,
    OptimizerStep,
    ParallelGroups,
    TokenBatch,
)
from fastrl.layers.losses import reduce_metrics
from fastrl.parallel import group_rank
from tests.helpers.batches import HIDDEN_SIZE, VOCAB_SIZE, padded_head, ragged_documents
from tests.helpers.layouts import Ranks
from tests.helpers.ranks import RankPool

MAX_TOKENS = 20
POLICY = {"policy": {"type": "grpo", "normalisation": "documents"}}


@dataclass(frozen=True)
class Result:
    num_micro_batches: int
    num_tokens: list[int]
    grads: list[Tensor]
    metrics: dict[str, Tensor]


def _documents(ranks: int, rank: int, share: str) -> list[Document]:
    documents = [
        replace(document, reward=0.5 * number, group_id=number)
        for number, document in enumerate(ragged_documents())
    ]
    if ranks == 1:
        return documents
    if share == "some without a label":
        # Those of rank 0 have no label and no column.
        context = [
            Document(document.tokens, prompt_length=1)
            for document in documents
            if len(document.tokens) == 1
        ]
        return context if rank == 0 else documents
    return documents[:2] if rank == 0 else documents[2:]


def _run(documents: list[Document], groups: ParallelGroups) -> Result:
    head = LanguageModelHead(padded_head(losses=POLICY).config, groups, dtype=torch.float64)
    head.load_state_dict(padded_head(losses=POLICY).state_dict())
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    table.requires_grad_()
    step = OptimizerStep.from_documents(documents, MAX_TOKENS, groups)
    sizes = []
    for batch in step:
        # One collective in each pass, as of a data-parallel wrapper: ranks must have equally many.
        size = torch.tensor(batch.num_tokens)
        if groups.dp is not None:
            dist.all_reduce(size, group=groups.dp)
        sizes.append(batch.num_tokens)
        output = head(table[batch.tokens], batch)
        (0.7 * output.loss).backward()
        step.add(output)
    metrics = step.finish(head.loss_groups)
    grads = [table.grad, head.weight.grad]
    for grad in grads:
        assert grad is not None
        if groups.dp is not None:
            dist.all_reduce(grad, group=groups.dp)
    return Result(len(step), sizes, [grad for grad in grads if grad is not None], metrics)


def rank_of_step(share: str) -> Result:
    groups = Ranks(data=2).groups()
    return _run(_documents(2, group_rank(groups.dp), share), groups)


@pytest.mark.parametrize("share", ["all", "some without a label"])
def test_unequal_ranks_are_one_process(ranks: RankPool, share: str) -> None:
    expected = _run(_documents(1, 0, share), ParallelGroups())
    results = ranks(rank_of_step, 2, share)
    assert results[0].num_micro_batches == results[1].num_micro_batches > 1
    assert results[0].num_tokens[-1] == 1  # one slot of padding
    for result in results:
        for mine, single in zip(result.grads, expected.grads, strict=True):
            torch.testing.assert_close(mine, single, rtol=0, atol=1e-12)
        assert list(result.metrics) == list(expected.metrics)
        for name, value in expected.metrics.items():
            torch.testing.assert_close(result.metrics[name], value, rtol=1e-12, atol=1e-12)


def rank_of_disagreement() -> str:
    groups = Ranks(data=2).groups()
    document = Document([1, 2], prompt_length=1, logprobs=[-1.0])
    if group_rank(groups.dp) == 1:
        document = replace(document, ref_logprobs=[-1.0])
    try:
        OptimizerStep.from_documents([document], MAX_TOKENS, groups)
    except ValueError as error:
        return str(error)
    return "no error"


def test_all_ranks_refuse_a_column_that_only_some_have(ranks: RankPool) -> None:
    told = ranks(rank_of_disagreement, 2)
    assert told[0] == told[1]
    assert told[0].startswith(
        "`documents` with labels must have ['ref_logprobs'] on all data ranks"
    )


def rank_without_documents() -> tuple[int, dict[str, Tensor]]:
    groups = Ranks(data=2).groups()
    step = OptimizerStep.from_documents([], MAX_TOKENS, groups)
    return len(step), step.finish((groups.dp,))


def test_a_step_without_documents_on_any_rank(ranks: RankPool) -> None:
    for result in ranks(rank_without_documents, 2):
        assert result == (0, {})


def metrics_by_hand(scored: list[list[float | None]], columns: tuple[str, ...]) -> dict[str, float]:
    """On a data rank: metrics of batches made by hand, one document a reward."""
    groups = Ranks(data=2).groups()
    documents = [
        Document([1, 2, 3], 1, logprobs=[-1.0] * 2, advantage=1.0, reward=reward)
        for reward in scored[group_rank(groups.dp)]
    ]
    config = {"hidden_size": 4, "vocab_size": 6, "losses": {"policy": {"type": "grpo"}}}
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config), groups)
    (batch,) = TokenBatch.from_documents(documents, columns=columns).to_kwargs(groups)
    output = head(torch.ones(batch.num_tokens, 4), batch)
    return {k: v.item() for k, v in reduce_metrics(output.metrics, head.loss_groups).items()}


@pytest.mark.parametrize(
    ("scored", "reward", "share"),
    [
        ([[1.0], []], 1.0, 1.0),
        ([[1.0], [None]], 1.0, 0.5),
        ([[None, 0.5], [2.0, None]], 1.25, 0.5),
        ([[], []], 0.0, 0.0),
    ],
)
def test_z21_data_ranks_with_other_rewards_have_the_same_metrics(
    ranks: RankPool, scored: list[list[float | None]], reward: float, share: float
) -> None:
    first, second = ranks(metrics_by_hand, 2, scored, ("advantages", "old_logprobs"))
    assert first == second
    assert (first["policy/reward"], first["policy/reward_share"]) == (reward, share)


def grouped_by_hand() -> float:
    """On a data rank: the loss by groups, of which the second rank has none."""
    groups = Ranks(data=2).groups()
    document = Document([1, 2, 3], 1, logprobs=[-1.0] * 2, advantage=1.0, group_id="a")
    losses = {"policy": {"type": "grpo", "normalisation": "groups"}}
    config = {"hidden_size": 4, "vocab_size": 6, "losses": losses}
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config), groups)
    documents = [document] if group_rank(groups.dp) == 0 else []
    columns = ("advantages", "old_logprobs")
    (batch,) = TokenBatch.from_documents(documents, columns=columns).to_kwargs(groups)
    output = head(torch.ones(batch.num_tokens, 4), batch)
    return reduce_metrics(output.metrics, head.loss_groups)["policy/loss"].item()


def test_z21_a_data_rank_without_documents_has_no_groups(ranks: RankPool) -> None:
    first, second = ranks(grouped_by_hand, 2)
    assert first == second != 0
