"""Documents of each process: as many packs, of the same columns, on all of them."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from typing import Any

import pytest

from fastrl import Document, TokenBatch
from fastrl.data.partition import micro_batches_of_rank


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
