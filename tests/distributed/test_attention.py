"""Which keys a query sees when a packed sequence is split over ranks and pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastrl import Document, TokenBatch
from fastrl.data.slices import Layout, shard_slots
from fastrl.models.attention import FLEX_BLOCK_SIZE
from fastrl.models.split_attention import Visibility, interval_block_mask, segments

SIZE = 4


def packed(lengths: tuple[int, ...], multiple: int) -> TokenBatch:
    documents = [Document(tokens=[1] * length, prompt_length=1) for length in lengths]
    return TokenBatch.from_documents(documents, pad_to_multiple=multiple)


def slots_of_ranks(length: int, layout: Layout, pieces: int) -> list[Tensor]:
    return [
        shard_slots(length, rank=rank, size=SIZE, micro_sequences=pieces, layout=layout)
        for rank in range(SIZE)
    ]


def visible_pairs(visibility: Visibility) -> Tensor:
    """[T, K] bool, keys in their given order."""
    key = torch.arange(len(visibility.order))
    ordered = (key >= visibility.start[:, None]) & (key < visibility.stop[:, None])
    pairs = torch.empty_like(ordered)
    pairs[:, visibility.order] = ordered
    return pairs


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_query_sees_its_document_up_to_itself(layout: Layout, pieces: int) -> None:
    batch = packed((9, 1, 14, 3, 20, 5), SIZE * pieces * 2)
    slots = slots_of_ranks(batch.padded_length, layout, pieces)
    document, position = batch.document_index, batch.positions
    for piece in range(pieces):
        # The keys of a rank are those of its pieces so far; ranks follow one another.
        keys = torch.cat([rank_slots[: piece + 1].flatten() for rank_slots in slots])
        for rank in range(SIZE):
            queries = slots[rank][piece]
            own = (keys[None, :] == queries[:, None]).int().argmax(1)
            pairs = visible_pairs(Visibility.of(torch.stack([document[keys], position[keys]]), own))
            same = document[queries][:, None] == document[keys][None, :]
            expected = (
                same & (keys[None, :] <= queries[:, None]) & (document[queries] >= 0)[:, None]
            )
            expected |= keys[None, :] == queries[:, None]  # padding sees itself
            assert torch.equal(pairs, expected), (piece, rank)


@pytest.mark.parametrize("lengths", [(700, 30, 1, 500, 200), (1431,), (128,) * 11])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_blocks_and_segments_are_those_of_the_pairs(
    lengths: tuple[int, ...], layout: Layout
) -> None:
    batch = packed(lengths, 2 * SIZE)
    slots = slots_of_ranks(batch.padded_length, layout, 1)
    keys = torch.cat([rank_slots.flatten() for rank_slots in slots])
    columns = torch.stack([batch.document_index[keys], batch.positions[keys]])
    for rank in range(SIZE):
        num_queries = slots[rank].numel()
        own = torch.arange(num_queries) + rank * num_queries
        visibility = Visibility.of(columns, own)
        ordered = visible_pairs(visibility)[:, visibility.order]
        for segment in segments(visibility):
            assert torch.equal(segment.mask, ordered[segment.rows, segment.keys])
        assert sum(int(segment.mask.sum()) for segment in segments(visibility)) == ordered.sum()
        mask = interval_block_mask(visibility)
        rows, cols = (-(-size // FLEX_BLOCK_SIZE) for size in ordered.shape)
        padded = torch.zeros(rows * FLEX_BLOCK_SIZE, cols * FLEX_BLOCK_SIZE, dtype=torch.bool)
        padded[: ordered.shape[0], : ordered.shape[1]] = ordered
        blocks = padded.view(rows, FLEX_BLOCK_SIZE, cols, FLEX_BLOCK_SIZE)
        chosen = mask.to_dense()[0, 0].bool()
        assert not (blocks.any(3).any(1) & ~chosen).any()  # no pair is left out
        full = torch.zeros_like(chosen)
        assert mask.full_kv_num_blocks is not None
        assert mask.full_kv_indices is not None
        for row in range(rows):
            count = int(mask.full_kv_num_blocks[0, 0, row])
            full[row, mask.full_kv_indices[0, 0, row, :count].long()] = True
        # A block without mask has all its pairs; rows beyond the last query do not exist.
        exists = torch.arange(rows * FLEX_BLOCK_SIZE).view(rows, -1) < ordered.shape[0]
        assert (blocks | ~exists[:, :, None, None]).all(3).all(1)[full].all()
