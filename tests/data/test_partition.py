"""Documents of each process: as many packs, of the same columns, on all of them."""

from __future__ import annotations

from math import isnan, nan

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
    scored = any(reward is not None for reward in rewards)
    assert all((batch.rewards is not None) == scored for batch in batches)
    found = [
        reward
        for batch in batches
        if batch.rewards is not None and batch.num_labels
        for reward in batch.rewards.tolist()
    ]
    assert [x for x in found if not isnan(x)] == [1.0] * scored
