"""Padding, counts, row sets and slices of packed batches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.data.batch import BatchCounts, BatchKwargs, RowSet, TokenBatch
from fastrl.data.documents import Document
from fastrl.data.slices import Layout, shard_slots, split_multiple

_VECTORS = (
    "tokens",
    "positions",
    "labels",
    "document_index",
    "label_counts",
    "advantages",
    "old_logprobs",
    "temperature",
    "model_version",
)


def _documents(seed: int, count: int = 7) -> list[Document]:
    rng = random.Random(seed)
    documents = []
    for number in range(count):
        n = rng.randint(1, 9)
        prompt = rng.randint(0, n)
        advantage: Any = rng.choice([0.0, 1.0, [rng.choice([0.0, -1.0]) for _ in range(n)]])
        documents.append(
            Document(
                [rng.randrange(1, 50) for _ in range(n)],
                prompt_length=prompt,
                logprobs=[-rng.random() for _ in range(n - prompt)],
                advantage=advantage,
                temperature=rng.choice([0.5, 1.0]),
                model_version=number,
                reward=rng.choice([None, 1.0]),
            )
        )
    return documents


def _shards(
    batch: TokenBatch, size: int, micro_sequences: int, layout: Layout, *, join: bool = False
) -> list[tuple[BatchKwargs, ...]]:
    multiple = split_multiple(size, micro_sequences, layout)
    batch = batch.padded(-(-batch.padded_length // multiple) * multiple)
    counts = BatchCounts.of([batch])
    return [
        batch.shard(
            counts,
            rank=rank,
            size=size,
            micro_sequences=micro_sequences,
            layout=layout,
            join=join,
        )
        for rank in range(size)
    ]


def test_padding_is_by_length_only() -> None:
    """Token 0 is a token like any other: only slots behind the documents are padding."""
    document = Document([0, 0, 0], prompt_length=1, logprobs=[-1.0, -2.0])
    batch = TokenBatch.from_documents([document], pad_to_multiple=4)
    assert batch.labels.tolist() == [0, 0, -100, -100]
    assert batch.document_index.tolist() == [0, 0, 0, -1]
    assert batch.tokens.tolist() == [0, 0, 0, 0]
    assert (batch.num_tokens, batch.padded_length, batch.num_labels) == (3, 4, 2)
    longer = TokenBatch.from_documents([document], sequence_length=6, pad_to_multiple=4)
    assert longer.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert longer.columns["old_logprobs"].tolist() == [-1.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="must have at most 2 tokens"):
        TokenBatch.from_documents([document], sequence_length=2)
    with pytest.raises(ValueError, match="`pad_to_multiple` must be at least 1, got 0"):
        TokenBatch.from_documents([document], pad_to_multiple=0)


def test_padding_in_two_steps_is_padding_in_one() -> None:
    batch = TokenBatch.from_documents(_documents(0))
    length = batch.padded_length
    twice, once = batch.padded(length + 2).padded(length + 5), batch.padded(length + 5)
    assert torch.equal(twice.positions, once.positions)
    assert torch.equal(twice.document_index, once.document_index)
    with pytest.raises(ValueError, match="`length` must be at least"):
        once.padded(length)


def test_empty_batch_has_the_form_of_any_other() -> None:
    (kwargs,) = TokenBatch.from_documents([], sequence_length=4).to_kwargs()
    assert kwargs.labels.tolist() == [-100] * 4
    assert kwargs.num_labels_in_batch == kwargs.num_documents_in_batch == kwargs.num_documents == 0
    assert kwargs.labelled_rows is not None
    assert len(kwargs.labelled_rows) == 0
    assert kwargs.labelled_rows.document_ends == ()
    assert TokenBatch.from_documents([]).to_kwargs()[0].labels.tolist() == [-100]


def test_temperature_is_one_number_if_shared() -> None:
    first = Document([1, 2], prompt_length=1, temperature=0.7)
    second = Document([3], prompt_length=1, temperature=0.5)
    (kwargs,) = TokenBatch.from_documents([first, first], pad_to_multiple=8).to_kwargs()
    assert kwargs.temperature == 0.7
    (kwargs,) = TokenBatch.from_documents([first, second], pad_to_multiple=4).to_kwargs()
    assert isinstance(kwargs.temperature, Tensor)
    assert torch.equal(kwargs.temperature, torch.tensor([0.7, 0.7, 0.5, 1.0]))


def test_counts_are_those_of_the_step() -> None:
    documents = _documents(1, count=12)
    whole = BatchCounts.of([TokenBatch.from_documents(documents)])
    parts = [TokenBatch.from_documents(documents[i : i + 5]) for i in range(0, 12, 5)]
    assert BatchCounts.of(parts) == whole
    assert BatchCounts.of([]) == BatchCounts(0, 0)
    assert parts[0].to_kwargs(counts=whole)[0].num_labels_in_batch == whole.num_labels_in_batch
    assert parts[0].to_kwargs()[0].num_labels_in_batch == parts[0].num_labels


def test_d5_documents_without_labels_do_not_count() -> None:
    labelled = Document([1, 2, 3, 4, 5], prompt_length=1, logprobs=[-1.0] * 4, advantage=1.0)
    context = Document([1, 2, 3, 4, 5], prompt_length=5)
    batch = TokenBatch.from_documents([labelled, context])
    assert BatchCounts.of([batch]) == BatchCounts(4, 1)
    assert batch.num_documents == 2


@pytest.mark.parametrize("seed", range(10))
def test_row_sets_are_known_on_the_host(seed: int) -> None:
    batch = TokenBatch.from_documents(_documents(seed), pad_to_multiple=4)
    for (kwargs,) in _shards(batch, 2, 1, "contiguous"):
        labelled = (kwargs.labels != -100).tolist()
        index, advantages = kwargs.document_index.tolist(), batch.columns["advantages"]
        assert kwargs.advantages is not None
        active = [value != 0 for value in kwargs.advantages.tolist()]
        live = set(batch.document_index[advantages != 0].tolist())
        expected = {
            "labelled_rows": [t for t, is_label in enumerate(labelled) if is_label],
            "active_rows": [t for t, is_active in enumerate(active) if is_active],
            "active_document_rows": [
                t for t, is_label in enumerate(labelled) if is_label and index[t] in live
            ],
        }
        for name, rows in expected.items():
            row_set: RowSet = getattr(kwargs, name)
            assert row_set.index.tolist() == rows
            documents = [index[t] for t in rows]
            ends = [i + 1 for i, d in enumerate(documents) if documents[i + 1 : i + 2] != [d]]
            assert row_set.document_ends == tuple(ends)


def test_a_document_is_active_for_an_advantage_in_another_shard() -> None:
    document = Document([1, 2, 3, 4], prompt_length=0, advantage=[0.0, 0.0, 0.0, 1.0])
    batch = TokenBatch.from_documents([document])
    (first,), (second,) = _shards(batch, 2, 1, "contiguous")
    assert first.active_rows is not None
    assert first.active_document_rows is not None
    assert second.active_rows is not None
    assert first.active_rows.index.tolist() == []
    assert first.active_document_rows.index.tolist() == [0, 1]
    assert second.active_rows.index.tolist() == [0]


def test_m4_labels_are_shifted_before_the_split() -> None:
    one = TokenBatch.from_documents([Document([11, 12, 13, 14, 15, 16], prompt_length=0)])
    (first,), (second,) = _shards(one, 2, 1, "contiguous")
    assert first.labels.tolist() == [12, 13, 14]
    assert second.labels.tolist() == [15, 16, -100]
    assert first.label_counts.tolist() == second.label_counts.tolist() == [5.0, 5.0, 5.0]
    assert first.num_labels_in_batch == second.num_labels_in_batch == 5
    assert not first.whole_documents
    assert not second.whole_documents

    cut = [Document([11, 12, 13], prompt_length=0), Document([14, 15, 16], prompt_length=0)]
    (first,), (second,) = _shards(TokenBatch.from_documents(cut), 2, 1, "contiguous")
    assert first.labels.tolist() == [12, 13, -100]
    assert second.labels.tolist() == [15, 16, -100]
    assert first.document_index.tolist() == [0, 0, 0]
    assert second.document_index.tolist() == [1, 1, 1]
    assert first.num_documents == second.num_documents == 2
    assert first.whole_documents
    assert second.whole_documents


def test_d4_a_rank_may_hold_no_label() -> None:
    batch = TokenBatch.from_documents([Document(list(range(6)), prompt_length=4, advantage=1.0)])
    (first,), (second,) = _shards(batch, 2, 1, "contiguous")
    assert first.labels.tolist() == [-100, -100, -100]
    assert second.labels.tolist() == [4, 5, -100]
    assert first.labelled_rows is not None
    assert len(first.labelled_rows) == 0
    # The same on both ranks, though rank 0 has no label: a choice of collectives depends on it.
    assert (first.whole_documents, second.whole_documents) == (False, False)


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [7, 8])
def test_z1_zigzag_slices_put_back_are_the_whole(prompt: int, length: int) -> None:
    document = Document(list(range(length)), prompt_length=prompt)
    whole = TokenBatch.from_documents([document], pad_to_multiple=4)
    back = torch.full_like(whole.labels, 99)
    for rank, (shard,) in enumerate(_shards(whole, 2, 1, "zigzag")):
        slots = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
        assert shard.tokens.tolist() == whole.tokens[slots].tolist()
        back[slots] = shard.labels
    assert torch.equal(back, whole.labels)
    labels = [t for t in range(length) if t >= prompt]
    assert [label for label in back.tolist() if label != -100] == labels
    assert back[length - 1 :].tolist() == [-100] * (8 - length + 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("size", "micro_sequences"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("join", [False, True])
def test_every_slot_is_in_one_slice(
    layout: Layout, size: int, micro_sequences: int, join: bool
) -> None:
    batch = TokenBatch.from_documents(_documents(3))
    multiple = split_multiple(size, micro_sequences, layout)
    padded = batch.padded(-(-batch.padded_length // multiple) * multiple)
    (whole,) = padded.to_kwargs()
    for name in _VECTORS:
        expected = getattr(whole, name)
        back = torch.full_like(expected, 77)
        for rank, pieces in enumerate(_shards(batch, size, micro_sequences, layout, join=join)):
            slots = shard_slots(
                padded.padded_length,
                rank=rank,
                size=size,
                micro_sequences=micro_sequences,
                layout=layout,
            )
            assert len(pieces) == (1 if join else micro_sequences)
            back[slots.flatten()] = torch.cat([getattr(piece, name) for piece in pieces])
        assert torch.equal(back, expected), name


def test_micro_sequences_need_earlier_ones_only() -> None:
    """Piece by piece, a causal model finds all keys it needs in pieces that every rank has run."""
    slots = [
        shard_slots(24, rank=rank, size=2, micro_sequences=3, layout="zigzag") for rank in (0, 1)
    ]
    together = torch.cat(slots, dim=1).sort(dim=1).values
    assert torch.equal(together, torch.arange(24).view(3, 8))
    assert slots[0].tolist()[0] == [0, 1, 6, 7]


def test_documents_are_whole_unless_a_labelled_one_is_cut() -> None:
    context = Document([1, 2, 3, 4], prompt_length=4)
    short = Document([1, 2], prompt_length=0)
    batch = TokenBatch.from_documents([short, context, short])
    for pieces in (batch.to_kwargs(micro_sequences=2), *_shards(batch, 2, 1, "contiguous")):
        assert all(piece.whole_documents for piece in pieces)
    assert not any(piece.whole_documents for piece in batch.to_kwargs(micro_sequences=8))
    assert all(piece.cut_by_pieces for piece in batch.to_kwargs(micro_sequences=8))
    (joined,) = batch.to_kwargs(micro_sequences=8, join=True)
    assert joined.whole_documents
    assert not joined.cut_by_pieces


def test_to_kwargs_pads_until_the_split_is_even() -> None:
    batch = TokenBatch.from_documents([Document([1, 2, 3, 4, 5], prompt_length=0)])
    pieces = batch.to_kwargs(micro_sequences=2, layout="zigzag")
    assert [piece.num_tokens for piece in pieces] == [4, 4]
    with pytest.raises(ValueError, match="`length` must be a multiple of 2"):
        batch.shard(BatchCounts.of([batch]), rank=0, size=2)
    with pytest.raises(ValueError, match="`micro_sequences` must be at least 1, got 0"):
        batch.to_kwargs(micro_sequences=0)
    with pytest.raises(ValueError, match="`layout` must be 'contiguous' or 'zigzag'"):
        batch.to_kwargs(layout="ring")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`rank` must be from 0 to 1"):
        shard_slots(4, rank=2, size=2)


def _by_document(batch: TokenBatch) -> dict[int, Any]:
    """Everything a loss reads, by the model version, which numbers the documents here."""
    (kwargs,) = batch.to_kwargs()
    assert kwargs.model_version is not None
    return {
        int(version): [
            getattr(kwargs, name)[kwargs.model_version == version].tolist()
            for name in _VECTORS
            if name not in ("document_index", "model_version")
        ]
        for version in kwargs.model_version.unique()
        if version >= 0
    }


@pytest.mark.parametrize("seed", range(5))
def test_order_and_packing_change_nothing(seed: int) -> None:
    documents = _documents(seed)
    # One shared temperature makes a number; two context documents keep it a vector everywhere.
    others = [Document([1], prompt_length=1, temperature=t) for t in (0.5, 1.0)]
    whole = _by_document(TokenBatch.from_documents([*documents, *others]))
    shuffled = random.Random(seed).sample(documents, len(documents))
    assert (
        _by_document(TokenBatch.from_documents([*shuffled, *others], pad_to_multiple=16)) == whole
    )
    separate: dict[int, Any] = {}
    for start in range(0, len(documents), 3):
        part = [others[0], *shuffled[start : start + 3], others[1]]
        separate |= _by_document(TokenBatch.from_documents(part))
    assert separate == whole


def test_split_by_document_goes_back_into_documents() -> None:
    documents = _documents(4)
    batch = TokenBatch.from_documents(documents, pad_to_multiple=8)
    values = batch.split_by_document(batch.columns["old_logprobs"])
    again = [
        replace(document, logprobs=value, advantage=1.0, alignment="label")
        for document, value in zip(documents, values, strict=True)
    ]
    column = TokenBatch.from_documents(again, pad_to_multiple=8).columns["old_logprobs"]
    assert torch.equal(column, batch.columns["old_logprobs"])
    with pytest.raises(ValueError, match="`values` must have one value a slot"):
        batch.split_by_document(torch.zeros(3))


def test_rewards_have_one_value_a_document() -> None:
    documents = [Document([1, 2], prompt_length=1, reward=r) for r in (1.0, None, 0.0)]
    pieces = TokenBatch.from_documents(documents).to_kwargs(micro_sequences=2)
    for piece in pieces:
        assert piece.rewards is not None
        assert piece.rewards.nan_to_num(9.0).tolist() == [1.0, 9.0, 0.0]
    (plain,) = TokenBatch.from_documents([Document([1], prompt_length=1)]).to_kwargs()
    assert plain.rewards is None


def test_no_python_loop_runs_over_tokens() -> None:
    """Python-level work grows with documents: counted in calls, as times on a busy machine vary."""
    import cProfile
    import pstats

    def calls(length: int) -> int:
        tokens = torch.arange(length)
        document = Document(
            tokens, prompt_length=1, logprobs=torch.zeros(length - 1), advantage=1.0
        )
        profile = cProfile.Profile()
        profile.enable()
        TokenBatch.from_documents([document] * 3).to_kwargs()
        profile.disable()
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    calls(10)  # the first call also imports and compiles
    assert calls(100_000) <= calls(10) + 10


def test_the_longest_document_is_known_on_the_host_in_every_piece() -> None:
    documents = [Document([1] * n, prompt_length=1) for n in (2, 5, 3)]
    batch = TokenBatch.from_documents(documents, pad_to_multiple=16)
    for (kwargs,) in _shards(batch, 2, 1, "zigzag"):
        assert kwargs.max_document_length == 5
    pieces = batch.to_kwargs(micro_sequences=4)
    assert [piece.max_document_length for piece in pieces] == [5] * 4
    kwargs = pieces[0]
    for derived in (kwargs.span(1, 3), kwargs.select(torch.tensor([0])), kwargs.to("cpu")):
        assert derived.max_document_length == 5
    assert TokenBatch.from_documents([]).to_kwargs()[0].max_document_length == 0
    by_hand = BatchKwargs(
        **{name: getattr(kwargs, name) for name in ("tokens", "positions", "labels")},
        document_index=kwargs.document_index,
        label_counts=kwargs.label_counts,
        num_documents=3,
        num_labels_in_batch=1,
        num_documents_in_batch=1,
    )
    assert by_hand.max_document_length is None


def test_a_temperature_may_be_a_tensor_without_dimensions() -> None:
    (kwargs,) = TokenBatch.from_documents([Document([1, 2], prompt_length=1)]).to_kwargs()
    shared = kwargs.replace(temperature=torch.tensor(0.5)).select(slice(0, 1)).to("cpu")
    assert shared.temperature == torch.tensor(0.5)
    with pytest.raises(ValueError, match=r"`temperature` must be floating-point, got torch\.int64"):
        kwargs.replace(temperature=torch.tensor(1))
    with pytest.raises(ValueError, match=r"`temperature` must be of shape \[T\]"):
        kwargs.replace(temperature=torch.tensor([0.5]))
    with pytest.raises(ValueError, match=r"`advantages` must be of shape \[T\]"):
        kwargs.replace(advantages=torch.tensor(0.5))
