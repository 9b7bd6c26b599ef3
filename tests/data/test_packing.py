"""Packing documents into sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fastrl.data.documents import Document, DocumentError
from fastrl.data.packing import pack_documents


def _documents(lengths: list[int]) -> list[Document]:
    return [
        Document([number] * length, prompt_length=0, model_version=number)
        for number, length in enumerate(lengths)
    ]


def _numbers(packs: list[list[Document]]) -> list[list[int | None]]:
    return [[document.model_version for document in pack] for pack in packs]


def _plain_first_fit(lengths: list[int], max_tokens: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for pack in packs:
            if sum(lengths[i] for i in pack) + lengths[number] <= max_tokens:
                pack.append(number)
                break
        else:
            packs.append([number])
    return [sorted(pack) for pack in packs]


@pytest.mark.parametrize("seed", range(20))
def test_first_fit_decreasing_equals_the_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 10) for _ in range(rng.randint(0, 40))]
    packs = _numbers(pack_documents(_documents(lengths), 10 + seed))
    assert packs == _plain_first_fit(lengths, 10 + seed)


def test_in_order_keeps_the_order() -> None:
    packs = pack_documents(_documents([3, 4, 2, 7, 1]), 7, order="in_order")
    assert _numbers(packs) == [[0, 1], [2], [3], [4]]
    assert pack_documents([], 7, order="in_order") == []


def test_a_document_that_is_too_long_is_refused() -> None:
    with pytest.raises(DocumentError, match=r"document 1: `tokens` must have at most 4 .* got 5"):
        pack_documents(_documents([3, 5]), 4)
    order: Any = "random"
    with pytest.raises(ValueError, match="`order` must be"):
        pack_documents(_documents([3]), 4, order=order)
