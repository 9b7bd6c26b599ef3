"""Which slots of a packed sequence a sequence-data rank holds. Index arithmetic only, no groups."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag"]


def split_multiple(size: int, micro_sequences: int = 1, layout: Layout = "contiguous") -> int:
    """The number that a packed length must be a multiple of to be split evenly."""
    return size * micro_sequences * _chunks_per_rank(layout)


def shard_slots(
    length: int,
    *,
    rank: int,
    size: int,
    micro_sequences: int = 1,
    layout: Layout = "contiguous",
) -> Tensor:
    """Slots of the packed sequence that a rank holds, one row a micro-sequence.

    The sequence is cut into `micro_sequences` pieces in order, and each piece is split over the
    ranks. A piece thus depends on itself and on earlier pieces only, on all ranks, so that a causal
    model can run piece by piece with the keys and values of the earlier ones. Inside a piece:

    - contiguous: rank r of n holds chunk r of n;
    - zigzag: rank r holds chunks r and 2 n - 1 - r of 2 n, which evens out causal attention.

    Args:
        length: of the packed sequence, a multiple of `split_multiple(size, ...)`.
        rank: index in the sequence-data axis.
        size: number of ranks of that axis.
        micro_sequences: number of pieces.
        layout: of each piece over the ranks.

    Returns:
        [micro_sequences, length / (size micro_sequences)] int64, increasing in reading order.
    """
    multiple = split_multiple(size, micro_sequences, layout)
    if not 0 <= rank < size:
        raise ValueError(f"`rank` must be from 0 to {size - 1} (`size` - 1), got {rank}")
    if length % multiple:
        raise ValueError(
            f"`length` must be a multiple of {multiple} ({size} ranks, {micro_sequences} "
            f"micro-sequences, {layout}), got {length}; pad the sequence"
        )
    chunks = [rank] if layout == "contiguous" else [rank, 2 * size - 1 - rank]
    slots = torch.arange(length).view(micro_sequences, _chunks_per_rank(layout) * size, -1)
    return slots[:, chunks].flatten(1)


def shard_owners(
    length: int, *, size: int, micro_sequences: int = 1, layout: Layout = "contiguous"
) -> Tensor:
    """[length] int64: for each slot of the packed sequence, rank * micro_sequences + piece."""
    owners = torch.empty(length, dtype=torch.int64)
    pieces = torch.arange(micro_sequences).unsqueeze(1)
    for rank in range(size):
        slots = shard_slots(
            length, rank=rank, size=size, micro_sequences=micro_sequences, layout=layout
        )
        owners[slots] = rank * micro_sequences + pieces
    return owners


def rows_over_ranks(
    ranks: Tensor,  # [length]
    pieces: Tensor,  # [length]
) -> Tensor:
    """[length] int64: each slot's row where the ranks' shards of its piece follow each other.

    Args:
        ranks: that hold each slot.
        pieces: that each slot belongs to, equally many in each.
    """
    order = (pieces * (ranks.max() + 1) + ranks).argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order)) % (len(order) // (int(pieces.max()) + 1))
    return rows


def _chunks_per_rank(layout: Layout) -> int:
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"`layout` must be 'contiguous' or 'zigzag', got {layout!r}")
    return 1 if layout == "contiguous" else 2
