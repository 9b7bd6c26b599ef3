"""Pairs of documents: what is none is refused, and one sum over documents serves all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from fastrl import Document, TokenBatch
from fastrl.data.preferences import preference_pairs
from fastrl.functional.documents import document_sums
from tests.helpers.loss_cases import BY_NAME
from tests.helpers.loss_documents import pack, preference_documents, random_statistics, widen

Documents = list[Document]
NO_PAIRS: dict[str, Callable[[Documents], Documents]] = {
    "alone": lambda documents: documents[:5],
    "three": lambda documents: [*documents, documents[0]],
    "two_chosen": lambda documents: [replace(x, advantage=1.0) for x in documents],
    "none_chosen": lambda documents: [replace(x, advantage=-1.0) for x in documents],
    "nothing_to_learn": lambda documents: [
        replace(documents[0], prompt_length=len(documents[0].tokens)),
        *documents[1:],
    ],
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_what_is_no_pair_is_refused(name: str) -> None:
    batch = pack(NO_PAIRS[name](preference_documents()))
    with pytest.raises(ValueError, match=r"must be of pairs .* got \d that are not"):
        BY_NAME["dpo"].loss()(random_statistics(batch), batch)


def test_a_pair_over_two_packed_sequences_is_refused() -> None:
    batch = widen(TokenBatch.from_documents(preference_documents()[:2]).to_kwargs()[0])
    with pytest.raises(ValueError, match="got 2 that are not; pack whole pairs"):
        BY_NAME["dpo"].loss()(random_statistics(batch), batch)


def test_a_pair_without_any_label_is_none() -> None:
    documents = preference_documents()
    prompts = [replace(x, prompt_length=len(x.tokens), group_id="x") for x in documents[:2]]
    batch, more = pack(documents), pack([*documents, *prompts])
    statistics = random_statistics(more)
    first = statistics.map(lambda value: value[: batch.num_tokens])
    assert BY_NAME["dpo"].loss()(first, batch) == BY_NAME["dpo"].loss()(statistics, more)


def test_pairs_of_the_data_module() -> None:
    documents = preference_documents()
    pairs = [(documents[i], documents[j]) for i, j in ((0, 2), (5, 1), (3, 4))]
    batch = pack(preference_pairs(pairs))
    expected = pack([document for pair in pairs for document in pair])
    loss = BY_NAME["dpo"].loss()
    assert loss(random_statistics(batch), batch) == loss(random_statistics(expected), expected)


def test_loss_and_metrics_share_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack(preference_documents())
    statistics = random_statistics(batch)
    loss = BY_NAME["dpo"].loss()
    expected = loss(statistics, batch), loss.metrics(statistics, batch)
    calls = []

    def counted(*args: object) -> Tensor:
        calls.append(args)
        return document_sums(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("fastrl.layers.losses.dpo.document_sums", counted)
    assert loss.with_metrics(statistics, batch) == expected
    assert len(calls) == 1
