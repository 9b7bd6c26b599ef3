"""A packed sequence whose documents share slots, as runs of rows for FlashAttention's kernels.

A node of the tree is a run of slots that the same slots see: `visible_until` is one number there.
What a slot sees is its own node up to itself, and every node above it whole. So attention is a part
for the nodes themselves, causal, and one for each depth: what descends from the nodes of that depth
on one side, those nodes on the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.functional.transfer import send

Rows = slice | Tensor


@dataclass(frozen=True)
class Runs:
    """Runs of queries, and the run of keys of each: a part of attention over a packed sequence.

    Attributes:
        queries: rows of the packed sequence, run after run.
        keys: the same of the keys.
        query_starts: [N + 1] int32, where each run begins among the part's queries, and their
            number.
        key_starts: [N + 1] int32, the same of the keys.
        longest_queries: rows of the longest run, at least.
        longest_keys: the same of the keys.
        is_causal: whether queries and keys are the same rows, and a query sees keys up to itself.
    """

    queries: Rows
    keys: Rows
    query_starts: Tensor
    key_starts: Tensor
    longest_queries: int
    longest_keys: int
    is_causal: bool


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The parts of attention, as three tensors: what torch.compile takes without looking inside.

    Attributes:
        starts: int32: of each part `query_starts`, then `key_starts`.
        rows: int64: of each part its queries, then its keys, where they are not one stretch.
        sizes: int64, on the CPU: of each part its runs, then of queries and keys their number, the
            longest run, and the first row where they are one stretch, else -1.
    """

    starts: Tensor
    rows: Tensor
    sizes: Tensor

    # On the host, where the tree decides shapes: nothing to compile.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(
        cls,
        visible_until: Tensor,  # [T]
        device: torch.device,
    ) -> PrefixTree:
        """The tree of a packed sequence.

        Args:
            visible_until: of `BatchKwargs`, on the CPU.
            device: of the tensors, which are sent there without waiting.
        """
        num_slots = len(visible_until)
        begins = torch.ones(num_slots, dtype=torch.bool)
        begins[1:] = visible_until[1:] != visible_until[:-1]
        start = begins.nonzero().squeeze(1)
        end = torch.cat([start[1:], torch.full((min(num_slots, 1),), num_slots)])
        stop = visible_until[start]
        # Nodes that began before this one and have not ended are those above it.
        num_ended = torch.searchsorted(stop.sort().values, start, right=True)
        depth = torch.arange(len(start)) - num_ended
        parts = [_part(start, end, start, end)]
        is_inner = stop > end
        for number in depth[is_inner].unique().tolist():
            nodes = is_inner & (depth == number)
            parts.append(_part(end[nodes], stop[nodes], start[nodes], end[nodes]))
        starts, rows, sizes = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if device.type == "cuda":
            starts, rows = send([starts, rows], device)
        return cls(starts, rows, sizes)

    # Nor here: the number of documents would make graphs.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of_documents(
        cls,
        starts: Tensor,  # [N + 1]
        num_slots: int,
        longest: int,
    ) -> PrefixTree:
        """That of documents which share nothing, whose bounds the host does not know.

        Args:
            starts: int32, first row of each document, and T.
            num_slots: T.
            longest: rows of the longest document, at least.
        """
        sizes = torch.tensor([len(starts) - 1, num_slots, num_slots, longest, longest, 0, 0])
        return cls(torch.cat([starts, starts]), starts.new_empty(0, dtype=torch.int64), sizes)


def runs_of(starts: Tensor, rows: Tensor, sizes: Tensor) -> Iterator[Runs]:
    """The parts of a tree, the nodes themselves first.

    Args:
        starts: of `PrefixTree`, as are the other two.
        rows: of each part.
        sizes: of each part.
    """
    for number, part in enumerate(sizes.view(-1, _NUM_SIZES).tolist()):
        num_runs, num_queries, num_keys, longest_queries, longest_keys, query, key = part
        query_starts, key_starts, starts = starts.tensor_split([num_runs + 1, 2 * num_runs + 2])
        listed = num_queries if query < 0 else 0
        queries, keys, rows = rows.tensor_split([listed, listed + (num_keys if key < 0 else 0)])
        yield Runs(
            slice(query, query + num_queries) if query >= 0 else queries,
            slice(key, key + num_keys) if key >= 0 else keys,
            query_starts,
            key_starts,
            longest_queries,
            longest_keys,
            is_causal=number == 0,
        )


_NUM_SIZES = 7


def _part(
    query: Tensor,  # [N]
    query_end: Tensor,  # [N]
    key: Tensor,  # [N]
    key_end: Tensor,  # [N]
) -> tuple[Tensor, Tensor, Tensor]:
    """`starts`, `rows` and `sizes` of a part, from the bounds of its runs."""
    starts, rows, counts, longest, first = [], [], [], [], []
    for begin, end in ((query, query_end), (key, key_end)):
        length = end - begin
        bounds = torch.cat([length.new_zeros(1), length.cumsum(0)])
        count = int(bounds[-1])
        starts.append(bounds.to(torch.int32))
        counts.append(count)
        longest.append(int(length.max()) if len(length) else 0)
        if bool((begin[1:] == end[:-1]).all()):
            first.append(int(begin[0]) if len(begin) else 0)
        else:
            first.append(-1)
            rows.append(torch.arange(count) + (begin - bounds[:-1]).repeat_interleave(length))
    sizes = torch.tensor([len(query), *counts, *longest, *first])
    return torch.cat(starts), torch.cat(rows) if rows else query[:0], sizes
