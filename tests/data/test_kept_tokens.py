"""Recorded keep-sets, from documents and files to the head: ragged, and a record for each label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import BatchKwargs, Document, TokenBatch
from fastrl.data.batch import BatchCounts
from fastrl.data.documents import DocumentError
from fastrl.data.equal_batches import equal_batches
from fastrl.data.rollouts import read_rollouts, write_rollouts
from fastrl.functional.head import torch_entries, torch_segments
from fastrl.functional.kept_tokens import KeptTokens
from tests.helpers.largest_tensor import LargestTensor
from tests.helpers.loss_documents import VOCAB_SIZE, pack, policy_documents
from tests.helpers.loss_heads import capped_head, random_hidden


def test_kept_tokens_move_to_their_labels() -> None:
    documents = [
        Document(tokens=[5, 6, 7], prompt_length=1, kept_tokens=[[6, 1], [7, 2, 3]]),
        Document(tokens=[8, 9], prompt_length=1, kept_tokens=[[], [9]]),
        Document(tokens=[3, 4], prompt_length=2),
    ]
    (batch,) = TokenBatch.from_documents(documents, pad_to_multiple=8).to_kwargs()
    assert _lists(batch) == [[6, 1], [7, 2, 3], [], [9], [], [], [], []]
    for copy in (batch.to("cpu"), batch.sent_to("cpu", pin_memory=False)):
        assert _lists(copy) == _lists(batch)
        assert torch.equal(copy.document_index, batch.document_index)
    assert _lists(batch.select(slice(1, 2))) == [[7, 2, 3]]
    assert _lists(batch.select(torch.tensor([3, 4, 0]))) == [[9], [], [6, 1]]
    by_hand = torch.tensor([[6, 1, -1], [7, 2, 3], [-1] * 3, [9, -1, -1], *[[-1] * 3] * 4])
    assert _lists(batch.replace(kept_tokens=by_hand)) == _lists(batch)
    with pytest.raises(ValueError, match="`kept_tokens` must be of 8 slots, one a label, got 7"):
        batch.replace(kept_tokens=by_hand[:7])
    with pytest.raises(ValueError, match=r"or int64 of shape \[T, K\] padded with -1, got"):
        batch.replace(kept_tokens=by_hand[:, 0])


def _lists(batch: BatchKwargs) -> list[list[int]]:
    assert isinstance(batch.kept_tokens, KeptTokens)
    return batch.kept_tokens.lists()


WITH = Document([5, 6, 7], prompt_length=1, logprobs=[-1.0] * 2, kept_tokens=[[6, 1], [7]])


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([WITH, replace(WITH, kept_tokens=[[6], []])], "1: .* got none for token 2"),
        ([replace(WITH, kept_tokens=[[], [], [7]])], "0: .* got none for token 1"),
    ],
)
def test_k21_a_label_without_a_record_is_refused_by_place(
    documents: list[Document], message: str
) -> None:
    with pytest.raises(DocumentError, match=f"document {message}"):
        TokenBatch.from_documents(documents)


def test_k21_tokens_and_documents_without_a_label_need_no_record() -> None:
    documents = [
        replace(WITH, kept_tokens=[[], [6], [7]]),
        Document([1, 2], loss_mask=[True, False]),
    ]
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    assert _lists(batch) == [[6], [7], [], [], []]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_k21_a_file_names_the_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rollouts{suffix}"
    write_rollouts(path, [WITH, WITH])
    (first, _), good = read_rollouts(path, require=[]), path.read_bytes()
    assert first.kept_tokens == [[6, 1], [7]]
    with pytest.raises(ValueError, match="`kept_tokens` must hold an id at least for each label"):
        write_rollouts(path, [WITH, replace(WITH, kept_tokens=[[6], []])])
    assert path.read_bytes() == good
    if suffix == ".jsonl":
        path.write_text(good.decode().replace("[7]", "[]"), encoding="utf-8")
        with pytest.raises(ValueError, match=r"line 1: `kept_tokens` .* got none for token 2"):
            list(read_rollouts(path, require=[]))


def test_u21_memory_is_about_the_ids_given() -> None:
    """One token of 100,000 entries beside many of one entry."""
    kept = [[0], [*range(100_000)], *([k] for k in range(998))]
    document = Document([1] * 1001, prompt_length=1, kept_tokens=kept)
    with LargestTensor() as largest:
        packed = TokenBatch.from_documents([document], pad_to_multiple=8)
        pieces = packed.to_kwargs(micro_sequences=2)
        numbers = [len(piece.kept_tokens.ids) for piece in pieces]  # type: ignore[union-attr]
    assert sorted(numbers) == [496, 100_503]
    assert 100_000 < largest.numel < 110_000


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([[1]], r"must have 3 \(one a token\) or 2 \(one a completion token\) lists, got 1"),
        ([[1], [-1]], "must hold ids of at least 0 alone"),
        ([[1], [0.5]], "must hold ids of at least 0 alone"),
    ],
)
def test_kept_tokens_that_do_not_fit_are_refused(kept: list[list[int]], message: str) -> None:
    with pytest.raises(DocumentError, match=f"document 0: `kept_tokens` {message}"):
        TokenBatch.from_documents([Document(tokens=[0] * 3, prompt_length=1, kept_tokens=kept)])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_kept_tokens_survive_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rollouts{suffix}"
    kept = [[6, 1], [7, 2, 3]]
    write_rollouts(path, [Document(tokens=[5, 6, 7], prompt_length=1, kept_tokens=kept)])
    (read,) = read_rollouts(path, require=[])
    assert read.kept_tokens == kept


def recorded_head() -> Any:
    return capped_head({"policy": {"type": "grpo"}}, keep={"recorded": True}, chunk_size=4)


def test_u21_the_head_makes_no_table_of_tokens_and_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (torch_entries, torch_segments):
        monkeypatch.setattr(module, "GATHERED_ELEMENTS", 20_000)
    batch = pack(policy_documents())
    many = torch.arange(30).repeat(1000)  # of one token, most of them more than once
    slots = torch.cat([torch.zeros(len(many), dtype=torch.int64), torch.arange(batch.num_tokens)])
    ids = torch.cat([many, torch.zeros(batch.num_tokens, dtype=torch.int64)])
    kept = KeptTokens(ids=ids, slots=slots, num_slots=batch.num_tokens)
    hidden = random_hidden(batch).requires_grad_()
    with LargestTensor() as largest:
        recorded_head()(hidden, batch.replace(kept_tokens=kept)).loss.backward()
    assert largest.numel == len(ids) + batch.num_tokens < batch.num_tokens * len(many)


def test_k21_the_head_takes_no_label_without_a_record_beside_others() -> None:
    batch = pack(policy_documents())
    entries = torch.zeros(batch.num_tokens, 2, dtype=torch.int64)
    head, hidden = recorded_head(), random_hidden(batch)
    head(hidden, batch.replace(kept_tokens=entries))
    slot = int((batch.labels != -100).nonzero()[2])
    entries[slot] = -1
    place = f"token {batch.positions[slot] + 1} of document {batch.document_index[slot]} "
    with pytest.raises(ValueError, match=f"every label of a document .* got none for {place}"):
        head(hidden, batch.replace(kept_tokens=entries))
    empty = TokenBatch.from_documents([], columns=["advantages", "old_logprobs"]).to_kwargs()[0]
    assert head(random_hidden(empty), empty).loss == 0


WITHOUT = replace(WITH, tokens=[3, 4, 1], kept_tokens=None)


def test_k21_documents_without_sets_are_those_of_the_whole_vocabulary() -> None:
    """In one sequence, and in micro-batches of one document."""
    everything = [list(range(VOCAB_SIZE))] * 2
    documents = [replace(each, advantage=0.7) for each in (WITH, WITHOUT, WITH, WITHOUT)]
    head, hidden = recorded_head(), torch.randn(4, 3, 5, dtype=torch.float64)

    def loss(documents: list[Document], splits: list[slice]) -> list[Tensor]:
        batches = [TokenBatch.from_documents(documents[part]) for part in splits]
        batches = equal_batches(batches)
        counts, values = BatchCounts.of(batches), []
        for batch, part in zip(batches, splits, strict=True):
            (kwargs,) = batch.to_kwargs(counts=counts)
            values.append(head(hidden[part].flatten(0, 1), kwargs).loss)
        total = torch.stack(values).sum()
        return [total, *torch.autograd.grad(total, list(head.parameters()))]

    one, each = [slice(0, 4)], [slice(n, n + 1) for n in range(4)]
    wanted = loss(
        [x if x.kept_tokens else replace(x, kept_tokens=everything) for x in documents], one
    )
    for splits in (one, each):
        found = loss(documents, splits)
        for value, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def test_k21_the_rows_without_sets_are_known_from_the_whole_document() -> None:
    """A shard of which no token has an entry may be the rest of a document that has some."""
    long = Document([1] * 8, loss_mask=[True] * 2 + [False] * 5 + [True], kept_tokens=[[1]] * 8)
    other = Document([2] * 8, prompt_length=6)
    packed = TokenBatch.from_documents([long, other])
    entries = torch.full((packed.num_tokens, 1), -1)
    entries[0] = 1
    packed = replace(packed, kept_tokens=KeptTokens.from_padded(entries))
    shards = [
        packed.shard(BatchCounts.of([packed]), rank=rank, size=4)[0].unrecorded_rows
        for rank in range(4)
    ]
    assert [len(rows) for rows in shards if rows is not None] == [0, 0, 0, 2]
