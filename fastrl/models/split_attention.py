"""Attention of packed documents whose tokens are split over ranks, pieces, or both.

Queries are this rank's tokens of one piece. Keys and values are those of all tokens up to there: of
all ranks of the sequence-data axis (one all-gather a layer, whose backward is one reduce-scatter)
and of the earlier pieces (kept by `Pieces`). Which key a query may see follows from document and
position alone, so nothing here depends on how a packed sequence is sliced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask

from fastrl.config.model import WHOLE_DOCUMENTS, AttentionImplementation
from fastrl.data.prefixes import check_not_split
from fastrl.models.attend import Attend, DocumentLengths, LayerAttention
from fastrl.models.attention import (
    FLEX_BLOCK_SIZE,
    document_attention,
    flex_output,
    packed_block_mask,
    uses_flex,
)
from fastrl.models.prefix_attention import prefix_attention
from fastrl.parallel import all_gather, gather_first_dim, group_rank, group_size


def packed_attention(
    document_index: Tensor,  # [T]
    positions: Tensor,  # [T]
    *,
    group: ProcessGroup | None,
    pieces: Pieces | None,
    implementation: AttentionImplementation,
    head_dim: int,
    dtype: torch.dtype,
    lengths: DocumentLengths | None = None,
    visible_until: Tensor | None = None,  # [T]
) -> LayerAttention:
    """Causal attention inside documents of a packed sequence, split or whole.

    Args:
        document_index: of this rank's tokens, -1 is padding.
        positions: of this rank's tokens in their documents.
        group: the sequence-data axis; None if one rank holds the whole sequence.
        pieces: the pieces that ran before; None for a sequence in one piece.
        implementation: as `LlamaConfig.attention_implementation`.
        head_dim: size of one head.
        dtype: of query, key and value.
        lengths: of the documents, known on the host.
        visible_until: of `BatchKwargs`, where documents share slots.

    Raises:
        ValueError: the implementation does not run here, or documents that share slots are split.
    """
    options: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype, "lengths": lengths}
    if visible_until is not None:
        check_not_split(group_size(group), 1 if pieces is None else 2)
        return prefix_attention(visible_until, implementation=implementation, **options)
    if group is None and pieces is None:
        return document_attention(document_index, implementation=implementation, **options)
    if implementation in WHOLE_DOCUMENTS:
        raise ValueError(
            f"`attention_implementation: {implementation}` must not be given where documents are"
            " split over sequence-data ranks or micro-sequences; use `flex`."
        )
    keys = own = torch.stack([document_index, positions])
    if pieces is not None:
        keys = pieces.begin(own)
    num_own, offset = keys.shape[1], 0
    if group is not None:
        # [size, 2, K] of all ranks, this rank's at its place.
        offset = group_rank(group) * num_own
        keys = gather_first_dim(keys[None], group).transpose(0, 1).flatten(1)
    index = torch.arange(num_own - own.shape[1], num_own, device=own.device) + offset
    with_flex = uses_flex(implementation, own.device, head_dim, dtype)
    return SplitAttention(Visibility.of(keys, index), group, pieces, with_flex=with_flex)


@dataclass(frozen=True)
class Visibility:
    """What queries see of keys in reading order: query q the keys [start[q], stop[q]).

    Attributes:
        order: [K] int64: the keys, document after document, by position.
        start: [T] int64.
        stop: [T] int64.
    """

    order: Tensor  # [K]
    start: Tensor  # [T]
    stop: Tensor  # [T]

    @classmethod
    def of(
        cls,
        keys: Tensor,  # [2, K]
        own: Tensor,  # [T]
    ) -> Visibility:
        """The visibility of queries among keys, without host synchronisation.

        A query sees the keys of its document up to itself; a padding token sees itself.

        Args:
            keys: int64 document index (-1 is padding) and position of each key.
            own: int64 index of each query among the keys.
        """
        document, position = keys
        num_keys = document.shape[0]
        number = torch.arange(num_keys, device=keys.device)
        # Padding comes after all documents, each slot a document of its own.
        last = document.max() + 1 if num_keys else 0
        document = torch.where(document < 0, last + number, document)
        # Stable sorts by the minor key first: together by document, then by position.
        order = position.argsort(stable=True)
        order = order[document[order].argsort(stable=True)]
        document = document[order]
        begins = torch.ones_like(document, dtype=torch.bool)
        begins[1:] = document[1:] != document[:-1]
        first = torch.where(begins, number, 0).cummax(0).values
        place = torch.empty_like(order)
        place[order] = number
        return cls(order, first[place[own]], place[own] + 1)


class SplitAttention:
    """Causal attention inside documents, of a rank's tokens among those of all ranks and pieces.

    Args:
        visibility: of this rank's tokens of the piece among all keys.
        group: of the sequence-data axis, None for one rank.
        pieces: keeps the keys and values of the earlier pieces, None for a sequence in one piece.
        with_flex: whether FlexAttention computes it; otherwise SDPA does, a document at a time.
    """

    def __init__(
        self,
        visibility: Visibility,
        group: ProcessGroup | None,
        pieces: Pieces | None,
        *,
        with_flex: bool,
    ) -> None:
        self._visibility, self._group, self._pieces = visibility, group, pieces
        self._block_mask = interval_block_mask(visibility) if with_flex else None
        self._segments = [] if with_flex else segments(visibility)

    def of_layer(self, number: int) -> Attend:
        """The attention of a layer, whose keys and values the pieces keep."""
        return partial(self._attend, number)

    def _attend(
        self,
        layer: int,
        query: Tensor,  # [T, H, head_dim]
        key: Tensor,  # [T, K, head_dim]
        value: Tensor,  # [T, K, head_dim]
    ) -> Tensor:  # [T, H, head_dim]
        key_value = torch.cat([key, value], 1)
        if self._pieces is not None:
            key_value = self._pieces.extend(layer, key_value)
        key_value = all_gather(key_value, self._group)
        key_value = key_value.flatten(1).index_select(0, self._visibility.order)
        key, value = key_value.view(-1, 2 * key.shape[1], key.shape[2]).chunk(2, 1)
        if self._block_mask is not None:
            return flex_output(query, key, value, self._block_mask)
        gqa = query.shape[1] != key.shape[1]
        outputs = [query[:0]]  # so that `cat` has an input when there are no tokens
        for segment in self._segments:
            q = query[segment.rows].transpose(0, 1)
            k, v = (tensor[segment.keys].transpose(0, 1) for tensor in (key, value))
            part = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=segment.mask, enable_gqa=gqa
            )
            outputs.append(part[0].transpose(0, 1))
        return torch.cat(outputs)


class Pieces:
    """Keys and values of the pieces of a packed sequence that ran so far, for the later ones.

    Memory: the keys and values of this rank's tokens, 2 * layers * T * K * head_dim elements.

    Attributes:
        keys: a piece: int64 [2, T], document index and position of its tokens.
        key_values: a piece, a layer: [T, 2 K, head_dim], keys and values of its tokens.
        current: a layer: the same of the running (or last) piece, with its graph.
    """

    def __init__(
        self, keys: Sequence[Tensor] = (), key_values: Sequence[list[Tensor]] = ()
    ) -> None:
        self.keys, self.key_values = list(keys), list(key_values)
        self.current: dict[int, Tensor] = {}
        self._own: Tensor | None = None

    def begin(
        self,
        own: Tensor,  # [2, T]
    ) -> Tensor:  # [2, all tokens so far]
        """Document index and position of all keys, those of the piece that begins here last."""
        self.current, self._own = {}, own
        return torch.cat([*self.keys, own], 1)

    # Lists that grow with every piece and layer: nothing to compile.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def extend(
        self,
        layer: int,
        key_value: Tensor,  # [T, 2 K, head_dim]
    ) -> Tensor:  # [all tokens so far, 2 K, head_dim]
        """The keys and values of the earlier pieces, then those of this one, which are noted.

        Under activation checkpointing a layer comes twice; its first tensor, which is part of the
        graph, is kept.
        """
        self.current.setdefault(layer, key_value)
        return torch.cat([*(piece[layer] for piece in self.key_values), key_value])

    def keep(self) -> None:
        """Ends the piece: its keys and values become leaves, whose `grad` later pieces add to."""
        assert self._own is not None
        leaves = [self.current[layer].detach().requires_grad_() for layer in sorted(self.current)]
        self.keys.append(self._own)
        self.key_values.append(leaves)

    def before(self, piece: int) -> Pieces:
        """The pieces before `piece`, the same leaves."""
        return Pieces(self.keys[:piece], self.key_values[:piece])


@dataclass(frozen=True)
class Segment:
    """Consecutive queries of one document and the keys that the last of them sees."""

    rows: slice
    keys: slice
    mask: Tensor  # [queries, keys] bool


def segments(visibility: Visibility) -> list[Segment]:
    """The queries in runs of one document, with masks. Synchronises with the host."""
    starts, stops = visibility.start.tolist(), visibility.stop.tolist()
    bounds = [row for row in range(len(starts)) if row == 0 or starts[row] != starts[row - 1]]
    result = []
    for first, last in pairwise([*bounds, len(starts)]):
        begin, end = starts[first], stops[last - 1]
        key = torch.arange(begin, end, device=visibility.stop.device)
        mask = key < visibility.stop[first:last, None]
        result.append(Segment(slice(first, last), slice(begin, end), mask))
    return result


def interval_block_mask(visibility: Visibility) -> BlockMask:
    """FlexAttention's mask of a visibility, block by block: no [T, K] pairs are evaluated."""
    start, stop = visibility.start, visibility.stop
    num_queries, num_keys = len(start), len(visibility.order)
    first_key = torch.arange(0, num_keys, FLEX_BLOCK_SIZE, device=start.device)
    end_key = first_key + FLEX_BLOCK_SIZE
    starts, stops = _query_blocks(start), _query_blocks(stop)
    needed = (end_key > starts.amin(1)[:, None]) & (first_key < stops.amax(1)[:, None])
    # An incomplete last block of keys ends after every stop, so it is never full.
    full = (first_key >= starts.amax(1)[:, None]) & (end_key <= stops.amin(1)[:, None])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside: Tensor = (key >= start[query]) & (key < stop[query])
        return inside

    return packed_block_mask(needed, full, visible, (num_queries, num_keys))


def _query_blocks(
    bounds: Tensor,  # [T]
) -> Tensor:  # [blocks, FLEX_BLOCK_SIZE]
    """The bounds block by block; the last block is filled up with the last query's."""
    missing = -len(bounds) % FLEX_BLOCK_SIZE
    return torch.cat([bounds, bounds[-1:].expand(missing)]).view(-1, FLEX_BLOCK_SIZE)
