"""Some rows of a batch: vectors are gathered when they are read, and are those of the rows."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import BatchKwargs, TokenBatch
from fastrl.functional.batch import _DTYPES
from fastrl.functional.streams import of_stream
from tests.helpers.shared_prefixes import grouped_documents

ROWS = torch.tensor([1, 8, 10, 13, 22, 24, 27, 31, 33, 36])


def batch() -> BatchKwargs:
    documents = [
        replace(each, rl_weight=number % 2 / 2) for number, each in enumerate(grouped_documents())
    ]
    (kwargs,) = TokenBatch.from_documents(documents).to_kwargs()
    return kwargs


def columns(found: BatchKwargs) -> dict[str, Any]:
    return {name: getattr(found, name) for name in _DTYPES}


def expected(index: Tensor) -> dict[str, Any]:
    values = columns(batch())
    values["visible_until"] = None
    return {
        name: value[index] if isinstance(value, Tensor) and value.ndim else value
        for name, value in values.items()
    }


def assert_same(found: BatchKwargs, index: Tensor, **others: Any) -> None:
    for name, value in (expected(index) | others).items():
        mine = getattr(found, name)
        assert torch.equal(mine, value) if isinstance(value, Tensor) else mine == value, name


def test_all_vectors_are_those_of_the_rows() -> None:
    assert_same(batch().select(ROWS), ROWS)
    assert_same(batch().select(slice(3, 17)), torch.arange(3, 17))
    assert_same(batch().select(ROWS).select(slice(1, 4)), ROWS[1:4])
    assert_same(batch().select(slice(3, 40)).select(ROWS), ROWS + 3)


def test_only_what_is_read_is_gathered() -> None:
    selected = batch().select(ROWS)
    assert "advantages" not in vars(selected)
    first = selected.advantages
    assert selected.advantages is first
    assert "tokens" not in vars(selected)


@pytest.mark.parametrize(
    "copied",
    [
        lambda selected: selected.to("cpu"),
        lambda selected: selected.replace(temperature=selected.temperature),
        copy.copy,
        copy.deepcopy,
        lambda selected: pickle.loads(pickle.dumps(selected)),
    ],
)
def test_copies_have_the_rows(copied: Any) -> None:
    assert_same(copied(batch().select(ROWS)), ROWS)


def test_what_is_set_comes_first() -> None:
    ones = torch.ones(len(ROWS))
    selected = batch().select(ROWS).replace(old_logprobs=ones)
    assert_same(selected, ROWS, old_logprobs=ones)


def test_the_batch_of_a_stream_leaves_what_nobody_read() -> None:
    selected = batch().select(ROWS)
    streamed = of_stream(selected, "rl")
    assert "old_logprobs" not in vars(streamed)
    counts, weights = batch().stream_counts["rl"].label_counts[ROWS], batch().rl_weights
    assert weights is not None
    labels = torch.where(weights[ROWS] != 0, batch().labels[ROWS], -100)
    assert not torch.equal(labels, batch().labels[ROWS])
    assert (labels != -100).any()
    assert_same(streamed, ROWS, labels=labels, label_counts=counts)
    assert streamed.stream == "rl"
    assert selected.stream is None
