"""The pool itself: results, a rank that raises, dies or hangs, and the next call after each."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, RankPool


def _sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a fault of this rank")
    dist.barrier()


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def _leave_alone(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.barrier()


def test_every_rank_answers_at_every_size(ranks: RankPool) -> None:
    assert ranks(_sum_of_ranks, 2) == [1, 1]
    assert ranks(_sum_of_ranks, 4) == [6] * 4
    assert ranks(_sum_of_ranks, 2) == [1, 1]


def test_a_rank_that_raises_is_reported_at_once(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 raised(.|\n)*a fault of this rank"):
        ranks(_raise_on, 2, 1)
    assert time.monotonic() - start < 20
    assert ranks(_sum_of_ranks, 2) == [1, 1]


def test_a_rank_that_dies_is_reported_at_once(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 3"):
        ranks(_exit_on, 2, 1)
    assert ranks(_sum_of_ranks, 2) == [1, 1]


def test_a_rank_that_hangs_is_reported_with_its_place(tmp_path: Path) -> None:
    pool = RankPool(tmp_path, timeout=8.0)
    pool(_sum_of_ranks, 2)
    pool(_sum_of_ranks, 3)  # another set of processes, started later
    with pytest.raises(RankError, match=r"from ranks \[0\](.|\n)*_leave_alone"):
        pool(_leave_alone, 2, 0)
    pool.close()
