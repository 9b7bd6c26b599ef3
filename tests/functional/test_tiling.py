"""How rows are cut into chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fastrl.config.losses import DEFAULT_MAX_LOGITS_BYTES
from fastrl.functional.head.tiling import chunk_rows

V = 128256
MOST = DEFAULT_MAX_LOGITS_BYTES // (2 * V)


def sizes(ends: list[int] | None) -> list[int]:
    assert ends is not None
    return [end - start for start, end in pairwise([0, *ends])]


def test_chunks_are_even() -> None:
    assert sizes(chunk_rows(0, V, 2, None, DEFAULT_MAX_LOGITS_BYTES)) == []
    assert sizes(chunk_rows(MOST, V, 2, None, DEFAULT_MAX_LOGITS_BYTES)) == [MOST]
    assert sizes(chunk_rows(4215, V, 2, 4096, DEFAULT_MAX_LOGITS_BYTES)) == [2304, 1911]


@pytest.mark.parametrize("num_rows", [MOST + 1, 16860, 67440, 1_000_000])
def test_several_chunks_leave_room_for_the_sum_of_the_weight_gradient(num_rows: int) -> None:
    """Logits and the fp32 sum (4 V D bytes, D = 4096) together do not grow with the rows."""
    chunks = sizes(chunk_rows(num_rows, V, 2, None, DEFAULT_MAX_LOGITS_BYTES))
    assert sum(chunks) == num_rows
    assert len(chunks) > 1
    assert 2 * V * max(chunks) + 4 * V * 4096 < 3.2 * 2**30


def test_documents_that_need_it_take_the_whole_bound() -> None:
    half, longest = 1500, 2400
    bytes_ = 2 * half * 2 * V
    short = [i * 1200 for i in range(1, 11)]
    assert max(sizes(chunk_rows(12000, V, 2, None, bytes_, short))) <= half
    long = [i * longest for i in range(1, 6)]
    assert sizes(chunk_rows(12000, V, 2, None, bytes_, long)) == [longest] * 5
    assert chunk_rows(12000, V, 2, None, bytes_, [2 * half + 1, 12000]) is None
