"""Shared prefixes over ranks: the step of one process on the flat sequence, to 1e-10."""

from __future__ import annotations

from functools import cache

import pytest

from fastrl import OptimizerStep
from tests.helpers.layouts import Ranks
from tests.helpers.ranks import RankPool
from tests.helpers.shared_prefixes import (
    LOSSES,
    Result,
    assert_same_step,
    documents_for,
    step_of,
    wide_batch,
)

LAYOUTS = {
    "dp2": (Ranks(data=2), False),
    "tp2": (Ranks(tensor=2), False),
    "stp2": (Ranks(tensor=2, sequence_parallel=True), False),
    "stp2_novp": (Ranks(tensor=2, sequence_parallel=True, vocabulary_parallel=False), False),
    "fsdp2": (Ranks(data=2), True),
    "fsdp2_stp2": (Ranks(data=2, tensor=2, sequence_parallel=True), True),
}


@cache
def flat(loss: str) -> Result:
    return step_of(loss, share_prefixes=False)


def rank_of_step(loss: str, name: str) -> Result:
    ranks, fully_sharded = LAYOUTS[name]
    return step_of(
        loss, share_prefixes=True, ranks=ranks, fully_sharded=fully_sharded, max_tokens=60
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shared_step_on_ranks_is_the_flat_one_of_one_process(
    ranks: RankPool, loss: str, name: str
) -> None:
    layout = LAYOUTS[name][0]
    results = ranks(rank_of_step, layout.world_size, loss, name)
    for result in results:
        assert_same_step(result, flat(loss))
    # Each rank of the data axis holds its documents, the ranks of the tensor axis hold the same.
    used = sum(result.num_tokens for result in results) / layout.tensor
    assert used < flat(loss).num_tokens


def rank_of_refusal() -> list[str]:
    groups = Ranks(sequence_data=2).groups()
    told = []
    for attempt in (
        lambda: OptimizerStep.from_documents(
            documents_for("grpo"), 100, groups, share_prefixes=True
        ),
        lambda: OptimizerStep.from_documents([], 100, groups, share_prefixes=True),
        lambda: wide_batch(0).to_kwargs(groups),
    ):
        try:
            attempt()
        except ValueError as error:
            told.append(str(error))
    return told


def test_sequence_data_ranks_are_refused_on_all_ranks_whatever_the_documents(
    ranks: RankPool,
) -> None:
    for told in ranks(rank_of_refusal, 2):
        assert len(told) == 3
        for message in told:
            assert "`share_prefixes` must not be given" in message
            assert "split over sequence-data ranks" in message
