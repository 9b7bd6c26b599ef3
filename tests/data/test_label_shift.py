"""The label shift and the checks of documents, against plain loops."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document, DocumentError

_FIELDS = ("logprobs", "ref_logprobs", "rollout_logprobs", "advantage")
_COLUMNS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages")


def _random_document(rng: random.Random) -> Document:
    n = rng.randint(1, 7)
    fields: dict[str, Any] = {"tokens": [rng.randrange(50) for _ in range(n)]}
    if rng.random() < 0.5:
        fields["prompt_length"] = rng.randint(0, n)
        lengths = [n, n - fields["prompt_length"]]
    else:
        fields["loss_mask"] = [rng.random() < 0.6 for _ in range(n)]
        lengths = [n]
    for name in _FIELDS:
        fields[name] = [-rng.random() for _ in range(rng.choice(lengths))]
    if rng.random() < 0.3:
        fields["advantage"] = rng.random()
    return Document(**fields, model_version=rng.randrange(5))


def _slots(document: Document) -> list[dict[str, Any]]:
    """One document in label alignment, by the definition."""
    tokens: Any = document.tokens
    n = len(tokens)
    slots = []
    for t in range(n):
        has_next = t + 1 < n
        if document.prompt_length is not None:
            learned = has_next and t + 1 >= document.prompt_length
        else:
            assert document.loss_mask is not None
            learned = has_next and bool(document.loss_mask[t + 1])
        slot: dict[str, Any] = {"tokens": tokens[t], "positions": t, "labels": -100}
        for field, column in zip(_FIELDS, _COLUMNS, strict=True):
            values: Any = getattr(document, field)
            if not learned:
                slot[column] = 0.0
            elif isinstance(values, float):
                slot[column] = values
            else:
                slot[column] = values[t + 1 - (n - len(values))]
        if learned:
            slot["labels"] = tokens[t + 1]
        slots.append(slot)
    return slots


@pytest.mark.parametrize("seed", range(30))
def test_every_slot_equals_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    documents = [_random_document(rng) for _ in range(rng.randint(1, 9))]
    (kwargs,) = TokenBatch.from_documents(documents).to_kwargs()
    expected = []
    for number, document in enumerate(documents):
        slots = _slots(document)
        count = sum(slot["labels"] != -100 for slot in slots)
        for slot in slots:
            slot |= {"document_index": number, "label_counts": float(count)}
            slot["model_version"] = document.model_version
        expected += slots
    for name in expected[0]:
        got = getattr(kwargs, name)
        want = torch.tensor([slot[name] for slot in expected], dtype=got.dtype)
        assert torch.equal(got, want), name
    assert kwargs.num_labels_in_batch == sum(slot["labels"] != -100 for slot in expected)
    assert kwargs.num_documents == len(documents)


def test_p1_shift_stays_inside_documents() -> None:
    documents = [
        Document(tokens=[10, 11, 12], prompt_length=0),
        Document(tokens=[20, 21], prompt_length=0),
    ]
    batch = TokenBatch.from_documents(documents)
    assert batch.labels.tolist() == [11, 12, -100, 21, -100]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.document_index.tolist() == [0, 0, 0, 1, 1]


def test_m1_labels_are_of_the_completion_only() -> None:
    batch = TokenBatch.from_documents([Document(tokens=[3, 1, 4, 2, 5], prompt_length=3)])
    assert batch.labels.tolist() == [-100, -100, 2, 5, -100]


def test_m2_token_and_label_alignment_give_the_same_slots() -> None:
    current = [-0.1, -2.0, -0.5]
    common: dict[str, Any] = {"tokens": [7, 8, 9, 6], "advantage": [0.0, 1.0, 2.0, 3.0]}
    by_token = Document(**common, prompt_length=1, logprobs=[0.0, *current])
    mask = [False, True, True, True]
    common["advantage"] = [1.0, 2.0, 3.0]
    by_label = Document(**common, loss_mask=mask, logprobs=current, alignment="label")
    for document in (by_token, by_label):
        (kwargs,) = TokenBatch.from_documents([document]).to_kwargs()
        assert kwargs.old_logprobs is not None
        assert kwargs.advantages is not None
        ratio = torch.exp(torch.tensor(current) - kwargs.old_logprobs[:3])
        assert ratio.tolist() == [1.0, 1.0, 1.0]
        assert kwargs.advantages.tolist() == [1.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("alignment", "length"), [("token", 3), ("token", 5), ("label", 4), ("label", 2)]
)
def test_m2_other_lengths_are_refused(alignment: Any, length: int) -> None:
    good = Document(tokens=[1, 2], prompt_length=1, logprobs=[-1.0])
    mask = [False, True, True, True]
    bad = Document([1, 2, 3, 4], loss_mask=mask, logprobs=[-1.0] * length, alignment=alignment)
    required = 4 if alignment == "token" else 3
    message = rf"document 1: `logprobs` must have {required} \(one a {alignment}\).*got {length}"
    with pytest.raises(DocumentError, match=message):
        TokenBatch.from_documents([good, bad])


@pytest.mark.parametrize("length", [0, 4, 6])
def test_a3_no_padding_no_truncation(length: int) -> None:
    document = Document(list(range(8)), prompt_length=3, logprobs=[-0.5] * length)
    message = rf"8 \(one a token\) or 5 \(one a completion token\) values, got {length}"
    with pytest.raises(DocumentError, match=message):
        TokenBatch.from_documents([document])


def test_e1_values_at_slots_without_label_are_replaced() -> None:
    bad = [float("nan"), float("-inf"), float("inf"), -1.0, float("nan")]
    mask = [True, False, False, True, False]
    document = Document([1, 2, 3, 4, 5], loss_mask=mask, logprobs=bad, ref_logprobs=bad)
    batch = TokenBatch.from_documents([document])
    assert batch.columns["old_logprobs"].tolist() == [0.0, 0.0, -1.0, 0.0, 0.0]
    assert batch.columns["ref_logprobs"].tolist() == [0.0, 0.0, -1.0, 0.0, 0.0]


def test_n6_the_first_token_is_never_a_label() -> None:
    """A mask that is true for the first token has no effect: nothing predicts it."""
    documents = [
        Document([1, 2, 3, 0], loss_mask=[True] * 4),
        Document([1, 2, 3, 0, 1, 2], loss_mask=[True] * 6),
        Document([5], loss_mask=[True]),
    ]
    batch = TokenBatch.from_documents(documents)
    assert batch.num_labels == 8
    assert batch.num_documents_with_labels == 2
    assert batch.document_label_counts.tolist() == [3, 5, 0]


def test_t2_raw_logprobs_at_another_temperature_are_refused() -> None:
    raw = Document(
        [0, 0], prompt_length=1, logprobs=[-0.126928], temperature=0.5, logprobs_temperature=1.0
    )
    with pytest.raises(DocumentError, match=r"`logprobs` must be taken at the temperature 0\.5"):
        TokenBatch.from_documents([raw])
    same = Document(
        [0, 0], prompt_length=1, logprobs=[-0.018150], temperature=0.5, logprobs_temperature=0.5
    )
    batch = TokenBatch.from_documents([same])
    assert batch.columns["old_logprobs"][0].item() == pytest.approx(-0.018150)


_N = float("nan")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": []}, "`tokens` must hold at least one token, got none"),
        ({"tokens": [1, -2]}, "`tokens` must be ids from 0 to 2^63 - 1, got -2 at position 1"),
        (
            {"tokens": np.array([1, 2**63], dtype=np.uint64)},
            "`tokens` must be ids from 0 to 2^63 - 1, got 9223372036854775808",
        ),
        ({"tokens": [1.0, 2.0]}, "`tokens` must be integers, got float64"),
        ({"tokens": [True, False]}, "`tokens` must be integers, got bool"),
        ({"tokens": ["1", "2"]}, "`tokens` must be integers, got other values"),
        ({"tokens": [[1], [2, 3]]}, "`tokens` must be a flat sequence"),
        ({"tokens": torch.ones(2, 2)}, "`tokens` must be a flat sequence, got 2 dimensions"),
        ({"prompt_length": None}, "`prompt_length` or `loss_mask` is required"),
        ({"loss_mask": [0, 1]}, "exactly one of them, got both"),
        (
            {"prompt_length": 3},
            "`prompt_length` must be an integer from 0 to 2 (the tokens), got 3",
        ),
        ({"prompt_length": -1}, "got -1"),
        ({"prompt_length": True}, "got True"),
        ({"prompt_length": None, "loss_mask": [1]}, "`loss_mask` must have 2 values, one a token"),
        ({"prompt_length": None, "loss_mask": [0, 2]}, "`loss_mask` must be booleans"),
        ({"prompt_length": None, "loss_mask": [0.0, 1.0]}, "`loss_mask` must be booleans"),
        ({"logprobs": [_N]}, "`logprobs` must be finite fp32 at every label, got nan for token 1"),
        ({"logprobs": [-1e39]}, "`logprobs` must be finite fp32 at every label, got -inf"),
        ({"logprobs": ["-1"]}, "`logprobs` must be numbers"),
        ({"logprobs": -1.0}, "`logprobs` must be a flat sequence, got 0 dimensions"),
        ({"advantage": _N}, "`advantage` must be a finite number, got nan"),
        ({"advantage": 10**400}, "`advantage` must be a finite number"),
        ({"advantage": [_N]}, "`advantage` must be finite fp32 at every label, got nan"),
        ({"advantage": True}, "`advantage` must be a finite number, got True"),
        ({"temperature": 0.0}, "`temperature` must be a finite number above 0, got 0.0"),
        ({"temperature": _N}, "`temperature` must be a finite number above 0, got nan"),
        ({"logprobs_temperature": -1}, "`logprobs_temperature` must be a finite number above 0"),
        ({"model_version": -1}, "`model_version` must be an integer of at least 0, got -1"),
        ({"model_version": 1.0}, "`model_version` must be an integer of at least 0, got 1.0"),
        ({"model_version": 2**63}, "`model_version` must be an integer below 2^63"),
        ({"reward": float("inf")}, "`reward` must be a finite number, or None for unscored"),
        ({"reward": "1"}, "`reward` must be a finite number"),
        ({"alignment": "both"}, "`alignment` must be 'token' or 'label', got 'both'"),
    ],
)
def test_bad_values_name_document_and_field(fields: dict[str, Any], message: str) -> None:
    good = Document(tokens=[1, 2, 3], prompt_length=3)
    values: dict[str, Any] = {"tokens": [1, 2], "prompt_length": 1}
    bad = Document(**(values | fields))
    with pytest.raises(DocumentError, match="document 1: .*" + re.escape(message)):
        TokenBatch.from_documents([good, bad])


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompt_length": 1}, 2),
        ({"prompt_length": 0}, 2),
        ({"prompt_length": 3}, 0),
        ({"prompt_length": 0, "tokens": [5]}, 0),
        ({"loss_mask": [1, 0, 1]}, 1),
        ({"loss_mask": [True, False, False]}, 0),
        ({"loss_mask": torch.tensor([False, False, True])}, 1),
        ({"loss_mask": np.zeros(3, dtype=np.bool_)}, 0),
    ],
)
def test_a_document_knows_whether_it_has_labels(fields: dict[str, Any], count: int) -> None:
    document = Document(**({"tokens": [5, 6, 7]} | fields))
    assert TokenBatch.from_documents([document]).num_labels == count
    assert document.has_labels == (count > 0)


def test_labelled_documents_have_a_column_all_or_none() -> None:
    full = Document([1, 2], prompt_length=1, logprobs=[-1.0], advantage=1.0)
    context = Document([1, 2], prompt_length=2)
    batch = TokenBatch.from_documents([context, full, context])
    assert batch.columns["old_logprobs"].tolist() == [0.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    lacking = Document([1, 2], prompt_length=1, advantage=1.0)
    with pytest.raises(DocumentError, match=r"document 2: `logprobs` is required, as document 1"):
        TokenBatch.from_documents([context, full, lacking])


def test_columns_are_carried_as_named() -> None:
    full = Document([1, 2], prompt_length=1, logprobs=[-1.0], advantage=1.0, model_version=3)
    context = Document([1, 2], prompt_length=2)
    batch = TokenBatch.from_documents([full], columns=["advantages"])
    assert set(batch.columns) == {"advantages"}
    assert batch.model_versions is None
    with pytest.raises(DocumentError, match="`ref_logprobs` is required, as the batch must carry"):
        TokenBatch.from_documents([full], columns=["ref_logprobs"])
    for documents in ([], [context]):
        batch = TokenBatch.from_documents(documents, columns=["advantages", "model_version"])
        (kwargs,) = batch.to_kwargs()
        assert kwargs.advantages is not None
        assert not kwargs.advantages.any()
        assert kwargs.model_version is not None
        assert kwargs.old_logprobs is None
    with pytest.raises(ValueError, match="`columns` must be names out of"):
        TokenBatch.from_documents([full], columns=["logprobs"])


def test_sequences_arrays_and_tensors_are_the_same() -> None:
    tokens, mask, values = [1, 2, 3], [0, 1, 1], [-1.0, -2.0, -0.5]
    documents = [
        Document(tokens, loss_mask=mask, logprobs=values, advantage=0.5),
        Document(
            np.array(tokens, dtype=np.uint16),
            loss_mask=np.array(mask, dtype=np.bool_),
            logprobs=np.array(values, dtype=np.float16),
            advantage=np.float64(0.5),
        ),
        Document(
            torch.tensor(tokens, dtype=torch.int32),
            loss_mask=torch.tensor(mask),
            logprobs=torch.tensor(values, dtype=torch.bfloat16, requires_grad=True),
            advantage=torch.tensor(0.5),
        ),
    ]
    batches = [TokenBatch.from_documents([document]) for document in documents]
    for batch in batches[1:]:
        assert torch.equal(batch.tokens, batches[0].tokens)
        assert torch.equal(batch.labels, batches[0].labels)
        for name, column in batches[0].columns.items():
            assert torch.equal(batch.columns[name], column)


def test_a_batch_does_not_alias_its_documents() -> None:
    tokens = np.array([1, 2, 3])
    batch = TokenBatch.from_documents([Document(tokens, prompt_length=1)])
    tokens[:] = 0
    assert batch.tokens.tolist() == [1, 2, 3]
