"""Chunks and tiles of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fastrl.kernels.arguments import ceil_div

# Rows and columns of a tile are multiples of this where the bounds allow.
ALIGNMENT = 256
# The blocks of a GEMM, and how many of them an H100 or H200 runs at a time.
BLOCK_ROWS, BLOCK_COLUMNS, BLOCKS_AT_A_TIME = 128, 256, 132
# A `recompute` tile needs no more than this to keep the GEMMs at full speed.
RECOMPUTE_TILE_BYTES = 88 * 2**20
RECOMPUTE_TILE_ROWS = 8192
# Below this many rows a chunk's fp32 update of grad_weight costs more than recomputing logits.
SINGLE_PASS_MIN_ROWS = 1024


@dataclass(frozen=True)
class Tiling:
    """Tiles of at most `num_rows` rows and `num_columns` columns."""

    num_rows: int
    num_columns: int


def recompute_tiling(
    num_rows: int,
    num_columns: int,
    itemsize: int,
    chunk_size: int | None,
    max_logits_bytes: int,
) -> Tiling:
    """Row and column bounds of even tiles of elements of `itemsize` bytes."""
    rows = min(num_rows, chunk_size or RECOMPUTE_TILE_ROWS, max(max_logits_bytes // itemsize, 1))
    rows = even_chunk(num_rows, max(rows, 1))
    columns = min(max_logits_bytes, RECOMPUTE_TILE_BYTES) // (itemsize * max(rows, 1))
    return Tiling(rows, _full_columns(rows, num_columns, max(columns, 1)))


def _full_columns(num_rows: int, num_columns: int, most: int) -> int:
    """At most `most` columns, a few less where that leaves a smaller last wave of blocks.

    Even slabs of any width take 1.003 to 2.6 times as long (benchmarks/results/slabs.json).
    """
    if num_columns <= most or most < BLOCK_COLUMNS:
        return even_chunk(num_columns, most)
    blocks = ceil_div(num_rows, BLOCK_ROWS)

    def share_of_work(width: int) -> float:
        rounds = ceil_div(blocks * width, BLOCKS_AT_A_TIME)
        return blocks * width / (rounds * BLOCKS_AT_A_TIME)

    widest = most // BLOCK_COLUMNS
    widths = range(widest, max(widest * 3 // 4, 1) - 1, -1)
    return BLOCK_COLUMNS * max(widths, key=share_of_work)


def single_pass_rows(
    num_columns: int, itemsize: int, chunk_size: int | None, max_logits_bytes: int
) -> int:
    """Most rows of elements of `itemsize` bytes that fit the bounds; at least 1."""
    rows = max(max_logits_bytes // (itemsize * max(num_columns, 1)), 1)
    return rows if chunk_size is None else min(rows, chunk_size)


def chunk_rows(
    num_rows: int,
    num_columns: int,
    itemsize: int,
    chunk_size: int | None,
    max_logits_bytes: int,
    document_ends: Sequence[int] | None = None,
) -> list[int] | None:
    """Ends of even chunks of rows whose logits, of `itemsize` bytes each, fit the bounds.

    With `document_ends` (cumulative rows at the end of each document) chunks hold whole documents;
    None if a single document exceeds the bounds. Several chunks use half of the bytes where
    possible: the other half is for the fp32 sum of their weight gradients, so that the peak does
    not grow with the number of rows.
    """
    most = single_pass_rows(num_columns, itemsize, chunk_size, max_logits_bytes)
    if num_rows > most:
        half = single_pass_rows(num_columns, itemsize, chunk_size, max_logits_bytes // 2)
        documents = pairwise([0, *(document_ends or [])])
        longest = max((end - start for start, end in documents), default=0)
        if max(longest, SINGLE_PASS_MIN_ROWS) <= half:
            most = half
    target = even_chunk(num_rows, most)
    if document_ends is None:
        return [stop for _, stop in spans(num_rows, target)]
    ends: list[int] = []
    start = previous = 0
    for end in document_ends:
        if end - previous > most:
            return None
        if end - start > target and previous > start:
            ends.append(previous)
            start = previous
        previous = end
    return [*ends, num_rows] if num_rows else []


def even_chunk(total: int, most: int) -> int:
    """Size of even chunks of `total` items, at most `most` each.

    4215 items in chunks of 4096 would be 4096 + 119, the second GEMM mostly overhead.
    """
    if total <= most:
        return max(total, 1)
    even = ceil_div(total, ceil_div(total, most))
    aligned = ceil_div(even, ALIGNMENT) * ALIGNMENT
    return aligned if aligned <= most else even


def spans(total: int, step: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive chunks of `total` items."""
    return [(start, min(start + step, total)) for start in range(0, total, step)]
