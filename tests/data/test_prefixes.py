"""Shared prefixes: the tree is the definition, and nothing of a document is lost or mixed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastrl import Document, OptimizerStep, ParallelGroups, TokenBatch
from fastrl.data.documents import DocumentError
from fastrl.data.packing import pack_documents
from fastrl.data.partition import balance_groups, balance_micro_batches, micro_batches_of_rank
from fastrl.data.prefixes import prefix_runs
from fastrl.models.flops import TrainingFlops
from tests.helpers.shared_prefixes import grouped_documents, tree_of_paths, wide_batch, with_group


def _slots(documents: list[Document]) -> int:
    """The number of slots by the definition, slot by slot."""
    distinct = set()
    for number, document in enumerate(documents):
        ids = list(document.tokens)
        if document.loss_mask is None:
            assert document.prompt_length is not None
            first = max(document.prompt_length, 1)
        else:
            first = [*map(bool, [False, *document.loss_mask[1:]]), True].index(True)
        for slot in range(len(ids)):
            labelled_before = slot + 1 >= first and first < len(ids)
            alone = labelled_before or document.group_id is None
            own = number if alone else None
            distinct.add((document.group_id, tuple(ids[: slot + 1]), own))
    return len(distinct)


def test_every_common_slot_is_there_once() -> None:
    documents = grouped_documents()
    batch = TokenBatch.from_documents(documents, share_prefixes=True)
    flat = TokenBatch.from_documents(documents)
    assert batch.num_tokens == batch.padded_length == _slots(documents)
    # Of the groups in their order: 3 * 8, 28 in the tree, 13 of turns, 2 * 5, 70 of prefixes.
    assert flat.num_tokens - batch.num_tokens == 145
    assert batch.document_lengths == flat.document_lengths
    assert batch.num_labels == flat.num_labels
    (kwargs,) = batch.to_kwargs()
    assert kwargs.max_document_length == 23


def test_the_example_of_the_docs() -> None:
    prompt = [3, 1, 4]
    documents = [
        Document([*prompt, *rest], prompt_length=3, group_id=0) for rest in ([2, 5], [9], [6, 7])
    ]
    batch = TokenBatch.from_documents(documents, sequence_length=10, share_prefixes=True)
    assert batch.tokens.tolist() == [3, 1, 4, 2, 5, 4, 9, 4, 6, 7]
    assert batch.labels.tolist() == [-100, -100, 2, 5, -100, 9, -100, 6, 7, -100]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 2, 3, 4]
    assert batch.document_index.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert batch.visible_until is not None
    assert batch.visible_until.tolist() == [10, 10, 5, 5, 5, 7, 7, 10, 10, 10]


@pytest.mark.parametrize("padding", [0, 7])
def test_a_slot_sees_its_document_up_to_itself(padding: int) -> None:
    documents = grouped_documents()
    batch = TokenBatch.from_documents(documents, share_prefixes=True)
    batch = batch.padded(batch.padded_length + padding)
    assert batch.visible_until is not None
    assert batch.paths is not None
    sees = tree_of_paths(batch.visible_until)
    flat = TokenBatch.from_documents(documents)
    seen = set()
    start = 0
    for path, length in zip(batch.paths, batch.document_lengths, strict=True):
        for place, slot in enumerate(path.tolist()):
            assert sees[slot].nonzero().flatten().tolist() == path[: place + 1].tolist()
            seen.add(slot)
        span = slice(start, start + length)
        for name in ("tokens", "labels", "positions"):
            assert torch.equal(getattr(batch, name)[path], getattr(flat, name)[span]), name
        for name, column in flat.columns.items():
            assert torch.equal(batch.columns[name][path], column[span]), name
        start += length
    slots = range(batch.num_tokens, batch.padded_length)
    assert seen.isdisjoint(slots)
    assert len(seen) == batch.num_tokens
    for slot in slots:
        assert sees[slot].nonzero().flatten().tolist() == [slot]
    assert (batch.document_index[batch.num_tokens :] == -1).all()


def test_a_shared_slot_has_no_label_and_a_label_its_document() -> None:
    batch = TokenBatch.from_documents(grouped_documents(), share_prefixes=True)
    assert batch.paths is not None
    uses = torch.zeros(batch.num_tokens, dtype=torch.int64)
    for number, path in enumerate(batch.paths):
        uses[path] += 1
        labelled = path[batch.labels[path] != -100]
        assert (batch.document_index[labelled] == number).all()
    assert (batch.labels[uses > 1] == -100).all()
    for column in batch.columns.values():
        assert (column[uses > 1] == 0).all()
    assert (uses > 1).sum() > 20


def test_values_come_back_by_document() -> None:
    documents = grouped_documents()
    batch = TokenBatch.from_documents(documents, share_prefixes=True)
    pieces = batch.split_by_document(batch.tokens)
    for document, piece in zip(documents, pieces, strict=True):
        assert piece.tolist() == list(document.tokens)[:-1]
    step = OptimizerStep.from_documents(documents, 40, share_prefixes=True)
    assert len(step) > 2
    values = [each.tokens for each in step.batches]
    for document, piece in zip(documents, step.split_by_document(values), strict=True):
        assert piece.tolist() == list(document.tokens)[:-1]


@pytest.mark.parametrize(
    "case", ["no_group", "groups_of_one", "other_prompts", "none", "one_token"]
)
def test_a_batch_that_shares_nothing_is_the_flat_one(case: str) -> None:
    documents = with_group(grouped_documents(), None)
    if case == "groups_of_one":
        documents = [replace(each, group_id=number) for number, each in enumerate(documents)]
    if case == "other_prompts":
        documents = [replace(d, tokens=[n, *d.tokens[1:]]) for n, d in enumerate(documents)]
        documents = with_group(documents, 0)
    if case == "none":
        documents = []
    if case == "one_token":
        documents = [Document([1, n], prompt_length=1, group_id=0) for n in range(3)]
    batch = TokenBatch.from_documents(documents, share_prefixes=True)
    assert batch.visible_until is None
    assert torch.equal(batch.tokens, TokenBatch.from_documents(documents).tokens)
    (kwargs,) = batch.to_kwargs()
    assert kwargs.visible_until is None


def test_tensors_and_arrays_share_as_lists_do() -> None:
    lists = [Document([300, 1, 70000, 5], prompt_length=3, group_id=0) for _ in range(2)]
    tensors = [replace(each, tokens=torch.tensor(each.tokens)) for each in lists]
    arrays = [replace(each, tokens=torch.tensor(each.tokens).int().numpy()) for each in lists]
    for documents in (lists, tensors, arrays):
        assert TokenBatch.from_documents(documents, share_prefixes=True).num_tokens == 6
        assert len(pack_documents(documents, 6, share_prefixes=True)) == 1
        assert len(pack_documents(documents, 5, share_prefixes=True)) == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["first_fit_decreasing", "in_order"])
def test_packs_are_no_larger_than_they_may_be(seed: int, order: str) -> None:
    documents = [
        replace(document, tokens=[*document.tokens[:-1], seed]) for document in grouped_documents()
    ]
    for max_tokens in (23, 40, 1000):
        packs = pack_documents(documents, max_tokens, order=order, share_prefixes=True)  # type: ignore[arg-type]
        found = sorted(id(document) for pack in packs for document in pack)
        assert found == sorted(map(id, documents))
        for pack in packs:
            batch = TokenBatch.from_documents(pack, share_prefixes=True)
            assert batch.num_tokens <= max_tokens
    flat = pack_documents(documents, 60)
    assert len(pack_documents(documents, 60, share_prefixes=True)) < len(flat)


def test_a_group_stays_together_where_it_fits() -> None:
    """4 documents of 9 + 1 tokens take 8 + 4 * 2 = 16 slots; three fit into 14."""
    documents = [Document([*range(9), n], prompt_length=9, group_id=0) for n in range(4)]
    other = [Document([7] * 5, prompt_length=1, group_id=1)]
    sizes = [len(pack) for pack in pack_documents([*documents, *other], 16, share_prefixes=True)]
    assert sizes == [4, 1]
    sizes = [len(pack) for pack in pack_documents([*documents, *other], 14, share_prefixes=True)]
    assert sorted(sizes) == [1, 1, 3]
    with pytest.raises(DocumentError, match="document 0: `tokens` must have at most 9"):
        pack_documents(documents, 9, share_prefixes=True)


def test_ranks_are_balanced_by_what_is_computed() -> None:
    """Four documents of 92 tokens that share 90 are about as much as one of 92."""
    shared = [Document([*range(91), n], prompt_length=91, group_id="a") for n in range(4)]
    alone = [Document([n] * 92, prompt_length=91, group_id=str(n)) for n in range(3)]
    for shares, expected in ((False, ["aaaa", "012"]), (True, ["aaaa2", "01"])):
        parts = balance_groups([*shared, *alone], 2, share_prefixes=shares)
        assert ["".join(str(each.group_id) for each in part) for part in parts] == expected
    ranks = balance_micro_batches(parts, 110, share_prefixes=True)
    assert [[len(pack) for pack in packs] for packs in ranks] == [[4, 1], [1, 1]]
    for rank, packs in enumerate(ranks):
        mine = micro_batches_of_rank([*shared, *alone], rank, 2, 110, share_prefixes=True)
        assert mine == packs
    with_room = balance_micro_batches([shared], 94, share_prefixes=True)
    assert [len(pack) for pack in with_room[0]] == [2, 2]


def test_flops_are_those_of_the_pairs_that_are_seen() -> None:
    batch = wide_batch(0)
    assert batch.visible_until is not None
    pairs = int(tree_of_paths(batch.visible_until).sum())
    counted = 0.0
    before: Tensor = torch.zeros(0, dtype=torch.int64)
    flops = TrainingFlops(body=0.0, attention=1.0, head=0.0)
    assert batch.paths is not None
    order = sorted(range(batch.num_documents), key=lambda n: int(batch.paths[n][-1]))  # type: ignore[index]
    for number in order:
        path = batch.paths[number]
        length = min(len(path), len(before))
        shared = int((path[:length] == before[:length]).sum())
        counted += flops.document(len(path), 0, shared)
        before = path
    # A squared length stands for twice the pairs, without the diagonal.
    assert counted == 2 * pairs - batch.num_tokens
    linear = TrainingFlops(body=1.0, attention=0.0, head=0.0)
    assert linear.document(10, 3, 4) == 6


@pytest.mark.parametrize(
    ("prompt", "completion", "group"),
    [(256, 1024, 8), (1024, 1024, 8), (4096, 1024, 8), (4096, 256, 16)],
)
def test_the_table_of_the_docs(prompt: int, completion: int, group: int) -> None:
    head = torch.arange(prompt)
    documents = [
        Document(torch.cat([head, torch.full((completion,), n)]), prompt_length=prompt, group_id=0)
        for n in range(group)
    ]
    (runs,) = prefix_runs(documents)
    cells = [str(prompt), str(completion), str(group)]
    pairs = TrainingFlops(body=0.0, attention=0.5e-6, head=0.0)
    for flops, form in (TrainingFlops(1.0, 0.0, 0.0), "{:,.0f}"), (pairs, "{:.1f} M"):
        flat = sum(flops.document(len(each.tokens), 0) for each in documents)
        lengths = [(len(documents[run.number].tokens), run.num_shared) for run in runs]
        shared = sum(flops.document(length, 0, num_shared) for length, num_shared in lengths)
        cells += [form.format(flat), form.format(shared), f"{flat / shared:.2f}"]
    page = Path(__file__).parent.parent.parent / "docs" / "data.md"
    assert f"| {' | '.join(cells)} |" in page.read_text(encoding="utf-8").splitlines()


def test_what_cannot_be_split_is_refused() -> None:
    batch = wide_batch(1)
    with pytest.raises(ValueError, match="split over micro-sequences"):
        batch.to_kwargs(micro_sequences=2)
    counts = OptimizerStep([batch]).counts
    padded = batch.padded(batch.padded_length + batch.padded_length % 2)
    with pytest.raises(ValueError, match="split over sequence-data ranks"):
        padded.shard(counts, rank=0, size=2)


def test_a_selection_is_not_taken_for_a_sequence() -> None:
    (kwargs,) = wide_batch(2).to_kwargs()
    assert kwargs.visible_until is not None
    assert kwargs.select(torch.arange(5)).visible_until is None
    assert kwargs.span(0, kwargs.num_tokens).visible_until is None
    with pytest.raises(ValueError, match="`visible_until` must be of shape"):
        kwargs.replace(visible_until=kwargs.visible_until[:3])


def test_bad_documents_are_named_as_without_sharing() -> None:
    good = Document([1, 2, 3], prompt_length=2, group_id=0)
    for bad in (replace(good, tokens=[1, -2, 3]), replace(good, prompt_length=7)):
        messages = []
        for share in (False, True):
            with pytest.raises(DocumentError) as error:
                OptimizerStep.from_documents([good, bad], 10, share_prefixes=share)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
        assert messages[0].startswith("document 1: ")


def test_all_pairs_of_a_group_share_what_they_can() -> None:
    batch = wide_batch(3)
    assert batch.paths is not None
    flat = [batch.tokens[path].tolist() for path in batch.paths]
    groups = batch.group_ids
    assert groups is not None
    for a, b in combinations(range(batch.num_documents), 2):
        common = len(set(batch.paths[a].tolist()) & set(batch.paths[b].tolist()))
        limits = []
        for number in (a, b):
            labels = batch.labels[batch.paths[number]] != -100
            limits.append(int(labels.int().argmax()))
        equal = 0
        while equal < min(*limits) and flat[a][equal] == flat[b][equal]:
            equal += 1
        assert common == (equal if groups[a] == groups[b] else 0)


def test_a_sharing_step_of_a_rank_needs_no_group() -> None:
    step = OptimizerStep.from_documents([], 10, ParallelGroups(), share_prefixes=True)
    assert len(step) == 0
