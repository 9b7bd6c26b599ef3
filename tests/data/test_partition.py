"""Documents of each process: as many packs, of the same columns, on all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

from benchmarks import balance_table
from fastrl import Document, TokenBatch
from fastrl.data.partition import balance_micro_batches, micro_batches_of_rank


def document(group: str, reward: float | None) -> Document:
    return Document(
        tokens=[1, 2, 3],
        prompt_length=1,
        logprobs=[-1.0, -1.0],
        rollout_logprobs=[-1.0, -1.0],
        advantage=0.5,
        model_version=3,
        kept_tokens=[[2, 7], [3]],
        reward=reward,
        group_id=group,
    )


@pytest.mark.parametrize("rewards", [(1.0,), (None, 1.0), (None, nan, 1.0), (None, None)])
def test_every_rank_carries_the_same_columns(rewards: tuple[float | None, ...]) -> None:
    documents = [document(str(number), reward) for number, reward in enumerate(rewards)]
    ranks = [micro_batches_of_rank(documents, rank, 3, max_tokens=3) for rank in range(3)]
    assert len({len(packs) for packs in ranks}) == 1
    batches = [TokenBatch.from_documents(pack) for packs in ranks for pack in packs]
    assert sum(batch.num_labels for batch in batches) == 2 * len(rewards)
    assert len({(*batch.columns, batch.model_versions is None) for batch in batches}) == 1
    assert all(batch.kept_tokens is not None for batch in batches)
    scored = any(reward is not None for reward in rewards)
    assert all((batch.rewards is not None) == scored for batch in batches)
    found = [
        reward
        for batch in batches
        if batch.rewards is not None and batch.num_labels
        for reward in batch.rewards.tolist()
    ]
    assert [x for x in found if not isnan(x)] == [1.0] * scored


@pytest.mark.parametrize("layout", [{"loss_mask": [0, 1, 1]}, {"alignment": "label"}])
def test_a_filler_follows_from_any_document(layout: dict[str, Any]) -> None:
    prompt_length = None if "loss_mask" in layout else 1
    first = replace(document("a", 1.0), prompt_length=prompt_length, **layout)
    if "loss_mask" in layout:
        values = [-1.0] * 3
        first = replace(first, logprobs=values, rollout_logprobs=values, kept_tokens=[[1]] * 3)
    ((filler,),) = micro_batches_of_rank([first], 1, 2, max_tokens=3)
    assert not filler.has_labels
    batch = TokenBatch.from_documents([filler])
    assert list(batch.columns) == list(TokenBatch.from_documents([first]).columns)


def lengthy(seed: int, groups: int = 32) -> list[Document]:
    """Groups of 8 documents of log-normal length, 200 to 8,000 tokens."""
    draw = random.Random(seed)
    return [
        Document(tokens=range(min(max(int(draw.lognormvariate(7.3, 0.8)), 200), 8000)),
                 prompt_length=100, group_id=group)
        for group in range(groups)
        for _ in range(8)
    ]  # fmt: skip


def work(document: Document, num_shared: int) -> float:
    num_tokens = len(document.tokens)
    return 1e4 * (num_tokens - num_shared) + num_tokens**2 - num_shared**2


@pytest.mark.parametrize("seed", range(3))
def test_the_slowest_rank_has_hardly_more_work_than_the_mean(seed: int) -> None:
    documents = lengthy(seed)
    ranks = [micro_batches_of_rank(documents, rank, 4, 16384, work) for rank in range(4)]
    amounts = [[sum(work(each, 0) for each in pack) for pack in packs] for packs in ranks]
    mean = sum(map(sum, amounts)) / 4
    # Micro-batch k of all ranks lasts as long as the largest.
    assert sum(max(column) for column in zip(*amounts, strict=True)) < 1.02 * mean


def test_every_document_is_in_one_micro_batch_and_every_group_on_one_rank() -> None:
    documents = lengthy(3)
    ranks = [micro_batches_of_rank(documents, rank, 4, 16384, work) for rank in range(4)]
    found = [document for packs in ranks for pack in packs for document in pack]
    assert sorted(map(id, found)) == sorted(map(id, documents))
    for packs in ranks:
        assert all(sum(len(document.tokens) for document in pack) <= 16384 for pack in packs)
    groups = [{document.group_id for pack in packs for document in pack} for packs in ranks]
    assert sum(map(len, groups)) == 32


def test_full_packs_take_a_micro_batch_more() -> None:
    """Three of 5, 5 and 6 tokens fill two packs of 8 to the brim: 5 + 3 and 5 + 3, then 6 alone."""
    lengths = [5, 5, 3, 3, 6]
    documents = [
        Document(tokens=range(n), prompt_length=1, group_id=i) for i, n in enumerate(lengths)
    ]
    (packs,) = balance_micro_batches([documents], 8)
    assert sorted(len(document.tokens) for pack in packs for document in pack) == sorted(lengths)
    assert all(sum(len(document.tokens) for document in pack) <= 8 for pack in packs)


def test_the_table_of_the_docs_is_the_plan_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the fewest ranks; all take half a minute."""
    monkeypatch.setattr(balance_table, "RANKS", (8,))
    page = Path(__file__).parent.parent.parent / "docs" / "scaling.md"
    rows = balance_table.table().splitlines()
    assert len(rows) == 5
    assert set(rows) <= set(page.read_text(encoding="utf-8").splitlines())
