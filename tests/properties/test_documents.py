"""Documents in every form keep each label and its values: packed, on disk, padded and split."""

from __future__ import annotations

from itertools import chain, pairwise
from operator import itemgetter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastrl import BatchKwargs, Document, TokenBatch, TokenStatistics
from fastrl.data.batch import BatchCounts
from fastrl.data.packing import pack_documents
from fastrl.data.padded import documents_from_padded, padded_from_documents
from fastrl.data.rollouts import read_rollouts, write_rollouts
from fastrl.data.slices import Layout, shard_slots, split_multiple
from fastrl.layers.losses import build_loss
from tests.helpers.loss_cases import BY_NAME
from tests.helpers.loss_documents import CURRENT_VERSION
from tests.properties.documents import NAMES, Facts, facts, labelled, many
from tests.properties.profile import examples

COLUMNS = {"old_logprobs": "logprobs", "ref_logprobs": "ref_logprobs",
           "rollout_logprobs": "rollout_logprobs"}  # fmt: skip


def shifted_labels(some: Facts) -> list[int]:
    labels = [
        token if is_label else -100
        for token, is_label in zip(some.tokens, some.is_label, strict=True)
    ]
    return [*labels[1:], -100]


def assert_says(document: Document, some: Facts) -> None:
    """The document's labels have the values of the facts, whatever its form."""
    columns = ["advantages", *COLUMNS]
    (kwargs,) = TokenBatch.from_documents([document], columns=columns).to_kwargs()
    assert kwargs.tokens.tolist() == some.tokens
    assert kwargs.labels.tolist() == shifted_labels(some)
    is_label = kwargs.labels != -100
    for column, name in COLUMNS.items():
        values = getattr(kwargs, column)
        assert values[is_label].tolist() == labelled(some.columns[name], some), column
        assert not values[~is_label].any()
    assert kwargs.advantages is not None
    assert kwargs.advantages[is_label].tolist() == labelled(some.advantage, some)


@given(facts())
@examples(150)
def test_a_document_says_the_same_in_every_form(some: Facts) -> None:
    assert_says(some.document, some)


@given(many(), st.integers(1, 5), st.integers(0, 3))
@examples(50)
def test_packing_keeps_labels_order_and_counts(
    several: list[Facts], multiple: int, extra: int
) -> None:
    length = sum(len(some.tokens) for some in several) + extra
    batch = TokenBatch.from_documents(
        [some.document for some in several],
        pad_to_multiple=multiple,
        sequence_length=length,
        columns=["advantages", *COLUMNS],
    )
    assert batch.padded_length % multiple == 0
    labels = [label for some in several for label in shifted_labels(some)]
    padding = batch.padded_length - len(labels)
    assert batch.labels.tolist() == labels + [-100] * padding
    positions = [i for some in several for i in range(len(some.tokens))]
    assert batch.positions.tolist() == [*positions, *range(padding)]
    numbers = [number for number, some in enumerate(several) for _ in some.tokens]
    assert batch.document_index.tolist() == numbers + [-1] * padding
    assert batch.num_labels == sum(label != -100 for label in labels)
    assert batch.num_documents_with_labels == sum(any(some.is_label) for some in several)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(9, 20))
@examples(100)
def test_packs_hold_every_document_once_by_their_rule(lengths: list[int], most: int) -> None:
    documents = [Document(tokens=[number] * n, prompt_length=0) for number, n in enumerate(lengths)]

    def packed(order: str) -> list[list[int]]:
        packs = pack_documents(documents, most, order=order)  # type: ignore[arg-type]
        return [[int(document.tokens[0]) for document in pack] for pack in packs]

    def size(pack: list[int]) -> int:
        return sum(lengths[number] for number in pack)

    for order in ("in_order", "first_fit_decreasing"):
        packs = packed(order)
        assert all(pack and pack == sorted(pack) and size(pack) <= most for pack in packs)
        assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
    in_order = packed("in_order")
    assert list(chain.from_iterable(in_order)) == list(range(len(lengths)))
    assert all(size(a) + lengths[b[0]] > most for a, b in pairwise(in_order))
    # No document of a pack had room in one of those before it.
    first_fit = packed("first_fit_decreasing")
    for later, pack in enumerate(first_fit):
        least = min(lengths[number] for number in pack)
        assert all(size(other) + least > most for other in first_fit[:later])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_documents_come_back_from_a_rollout_file(
    tmp_path_factory: pytest.TempPathFactory, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("rollouts") / f"rollouts.{suffix}"

    @given(many(min_size=1))
    @examples(20)
    def run(several: list[Facts]) -> None:
        assert write_rollouts(path, [some.document for some in several]) == len(several)
        again = list(read_rollouts(path))
        for document, some in zip(again, several, strict=True):
            assert_says(document, some)
            for name in ("temperature", "model_version", "reward", "group_id"):
                assert getattr(document, name) == getattr(some.document, name)
        write_rollouts(path, again)
        for document, some in zip(read_rollouts(path), several, strict=True):
            assert_says(document, some)

    run()


@given(many(min_size=1, has_prompt=False), st.data())
@examples(40)
def test_padded_rows_give_the_documents_and_take_their_values(
    several: list[Facts], data: st.DataObject
) -> None:
    """Each row has its tokens at any columns, holes included."""
    width = max(len(some.tokens) for some in several) + data.draw(st.integers(0, 3))
    shape = (len(several), width)
    matrices = {name: np.full(shape, 7.0, np.float32) for name in (*NAMES, "advantage")}
    tokens, attention, mask = (np.zeros(shape, np.int64) for _ in range(3))
    places = []
    for row, some in enumerate(several):
        columns = st.lists(st.integers(0, width - 1), min_size=len(some.tokens),
                           max_size=len(some.tokens), unique=True)  # fmt: skip
        at = sorted(data.draw(columns))
        places.append(at)
        tokens[row, at], attention[row, at], mask[row, at] = some.tokens, 1, some.is_label
        for name, matrix in matrices.items():
            matrix[row, at] = some.advantage if name == "advantage" else some.columns[name]
    documents = documents_from_padded(
        torch.from_numpy(tokens), attention, torch.from_numpy(mask), **matrices
    )
    for document, some in zip(documents, several, strict=True):
        assert_says(document, some)
    batch = TokenBatch.from_documents(documents)
    values = batch.split_by_document(batch.columns["old_logprobs"])
    back = padded_from_documents(values, attention, fill=5.0)
    for row, (some, at) in enumerate(zip(several, places, strict=True)):
        given_back = back[row, at].tolist()
        expected = [
            value if is_label else 0.0
            for value, is_label in zip(some.columns["logprobs"], some.is_label, strict=True)
        ]
        assert given_back[1:] == expected[1:]
        outside = [column for column in range(width) if column not in at]
        assert back[row, [*outside, at[0]]].tolist() == [5.0] * (len(outside) + 1)


@given(
    many(min_size=1),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["contiguous", "zigzag"]),
)
@examples(60)
def test_the_parts_of_a_split_batch_add_up(
    several: list[Facts], size: int, micro_sequences: int, layout: Layout
) -> None:
    batch = TokenBatch.from_documents(
        [some.document for some in several],
        pad_to_multiple=split_multiple(size, micro_sequences, layout),
    )
    counts = BatchCounts.of([batch])
    (whole,) = batch.shard(counts, rank=0, size=1)
    loss = build_loss(BY_NAME["grpo_stale"].parsed)
    statistics = _statistics(whole)
    expected = loss(statistics, whole.replace(current_version=CURRENT_VERSION))
    total = torch.zeros(())
    seen: list[int] = []
    for rank in range(size):
        options = {"rank": rank, "size": size, "layout": layout}
        options["micro_sequences"] = micro_sequences
        slots = shard_slots(batch.padded_length, **options)  # type: ignore[arg-type]
        parts = batch.shard(counts, **options)  # type: ignore[arg-type]
        for part, where in zip(parts, slots, strict=True):
            seen += where.tolist()
            _assert_slice(part, whole, where)
            local = statistics.map(itemgetter(where))
            total = total + loss(local, part.replace(current_version=CURRENT_VERSION))
    assert sorted(seen) == list(range(batch.padded_length))
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def _statistics(whole: BatchKwargs) -> TokenStatistics:
    """Of a policy near the old one."""
    assert whole.old_logprobs is not None
    near = whole.old_logprobs + torch.linspace(-0.3, 0.3, whole.num_tokens)
    return TokenStatistics(near, near.abs(), near.abs())


def _assert_slice(part: BatchKwargs, whole: BatchKwargs, where: torch.Tensor) -> None:
    """The slots of a part are those of the whole, its rows those with labels."""
    for name in ("tokens", "labels", "positions", "document_index", "label_counts", "advantages",
                 "old_logprobs", "model_version", "group_label_counts"):  # fmt: skip
        assert torch.equal(getattr(part, name), getattr(whole, name)[where]), name
    assert part.num_documents == whole.num_documents
    assert part.labelled_rows is not None
    assert part.active_rows is not None
    assert part.active_document_rows is not None
    is_label = part.labels != -100
    assert part.labelled_rows.index.tolist() == is_label.nonzero()[:, 0].tolist()
    assert part.advantages is not None
    active = (part.advantages != 0) & is_label
    assert part.active_rows.index.tolist() == active.nonzero()[:, 0].tolist()
    assert whole.advantages is not None
    acting = set(whole.document_index[whole.advantages != 0].tolist())
    in_acting = torch.tensor([number in acting for number in part.document_index.tolist()])
    expected = (is_label & in_acting).nonzero()[:, 0].tolist()
    assert part.active_document_rows.index.tolist() == expected
