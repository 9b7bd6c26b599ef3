"""Padded rows become documents and back, whatever the side of the padding and its holes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastrl import BatchKwargs, Document, OptimizerStep, TokenBatch, linear_logprobs
from fastrl.data.documents import DocumentError
from fastrl.data.padded import documents_from_padded, padded_from_documents

# Left and right padding, a hole, all padding, one token, none.
ATTENDED = [
    [0, 0, 1, 1, 1, 1],
    [1, 1, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 1],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
    [1, 1, 1, 1, 1, 1],
]
LEARNED = [
    [0, 0, 0, 1, 1, 1],
    [0, 1, 1, 0, 0, 0],
    [0, 0, 0, 1, 0, 1],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
    [1, 1, 1, 0, 0, 1],
]
SHAPE = (6, 6)
ROWS = (0, 1, 2, 4, 5)  # those with tokens


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.arange(36).view(SHAPE) + 100
    return tokens, torch.tensor(ATTENDED), torch.tensor(LEARNED)


def _by_hand(values: Tensor, row: int) -> list[Any]:
    return [values[row, column].item() for column in range(6) if ATTENDED[row][column]]


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.numpy(), lambda x: x.bool()])
def test_a_document_is_what_is_attended_to(make: Any) -> None:
    tokens, attended, learned = _tensors()
    logprobs = -torch.rand(SHAPE, dtype=torch.float64)
    documents = documents_from_padded(
        tokens,
        make(attended),
        make(learned),
        logprobs=logprobs,
        advantage=torch.arange(6.0),
        temperature=0.7,
        reward=[0.5, None, 1.0, 9.0, float("nan"), 2.0],
        group_id=torch.tensor([7, 7, 8, 8, 9, 9]),
        model_version=None,
    )
    assert len(documents) == len(ROWS)
    for document, row in zip(documents, ROWS, strict=True):
        assert list(document.tokens) == _by_hand(tokens, row)
        assert document.loss_mask is not None
        assert list(document.loss_mask) == _by_hand(learned, row)
        assert document.logprobs is not None
        assert list(document.logprobs) == _by_hand(logprobs, row)
        assert (document.advantage, document.temperature) == (float(row), 0.7)
        assert document.model_version is None
    assert [document.group_id for document in documents] == [7, 7, 8, 9, 9]
    assert [document.is_scored for document in documents] == [True, False, True, False, True]


def test_labels_cross_a_hole_and_positions_count_tokens() -> None:
    tokens, attended, learned = _tensors()
    logprobs = -torch.rand(SHAPE)
    (document,) = documents_from_padded(
        tokens[2:3], attended[2:3], learned[2:3], logprobs=logprobs[2:3]
    )
    (kwargs,) = TokenBatch.from_documents([document]).to_kwargs()
    assert kwargs.tokens.tolist() == [112, 113, 115, 117]
    assert kwargs.positions.tolist() == [0, 1, 2, 3]
    assert kwargs.labels.tolist() == [-100, 115, 117, -100]
    assert kwargs.old_logprobs is not None
    assert kwargs.old_logprobs.tolist() == [0, logprobs[2, 3].item(), logprobs[2, 5].item(), 0]


@pytest.mark.parametrize("width", [6, 5, 3])
def test_values_of_fewer_columns_belong_to_the_last(width: int) -> None:
    tokens, attended, learned = _tensors()
    learned = learned * torch.tensor([0, 0, 0, 1, 1, 1])
    whole = {name: -torch.rand(SHAPE) for name in ("logprobs", "ref_logprobs", "advantage")}
    whole["rollout_logprobs"] = -torch.rand(SHAPE)
    expected = documents_from_padded(tokens, attended, learned, **whole)
    cut = {name: values[:, 6 - width :] for name, values in whole.items()}
    cut["rollout_logprobs"] = whole["rollout_logprobs"][:, 1:]
    found = documents_from_padded(tokens, attended, learned[:, -3:], **cut)
    for mine, other in zip(_packed(found), _packed(expected), strict=True):
        assert torch.equal(mine, other)


def _packed(documents: list[Document]) -> list[Tensor]:
    (kwargs,) = TokenBatch.from_documents(documents).to_kwargs()
    names = ("labels", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages")
    return [kwargs.tokens, *(getattr(kwargs, name) for name in names)]


def test_values_where_nothing_is_learned_do_not_matter() -> None:
    tokens, attended, learned = _tensors()
    logprobs = torch.where(learned == 1, -1.0, torch.nan)
    documents = documents_from_padded(tokens, attended, learned, logprobs=logprobs)
    batch = TokenBatch.from_documents(documents)
    assert batch.columns["old_logprobs"].tolist() == [
        -1.0 if label >= 0 else 0.0 for label in batch.labels.tolist()
    ]
    # All are labels but the first tokens of the last two rows.
    assert batch.num_labels == sum(map(sum, LEARNED)) - 2
    wrong = torch.full(SHAPE, torch.nan)
    with pytest.raises(DocumentError, match="document 0: `logprobs` must be finite"):
        TokenBatch.from_documents(documents_from_padded(tokens, attended, learned, logprobs=wrong))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_precision_of_tensors_is_that_of_the_batch(dtype: torch.dtype) -> None:
    tokens, attended, learned = _tensors()
    logprobs, advantage = -torch.rand(SHAPE).to(dtype), torch.rand(6).to(dtype)
    for fields in ({"logprobs": logprobs}, {"advantage": advantage}):
        documents = documents_from_padded(tokens, attended, learned, **fields)
        (column,) = TokenBatch.from_documents(documents).columns.values()
        assert column.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert column[3].item() == 0
    assert column[0].item() == advantage[0].item()


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0, 0)])
def test_no_rows_and_no_columns(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape, dtype=torch.int64)
    assert documents_from_padded(empty, empty, empty, advantage=torch.zeros(shape[0])) == []
    assert padded_from_documents([], empty).shape == shape


def test_values_go_back_to_their_tokens_with_their_gradients() -> None:
    tokens, attended, learned = _tensors()
    logprobs = -torch.rand(SHAPE, dtype=torch.float64)
    documents = documents_from_padded(tokens, attended, learned, logprobs=logprobs)
    step = OptimizerStep.from_documents(documents, max_tokens=7, pad_to_multiple=4)
    assert len(step) > 1
    values = [batch.columns["old_logprobs"].clone().requires_grad_() for batch in step.batches]
    pieces = step.split_by_document(values)
    back = padded_from_documents(pieces, attended, fill=7.0)
    has_value = attended.bool() & (attended.cumsum(1) > 1)
    is_label = has_value & learned.bool()
    assert torch.equal(back[is_label], logprobs[is_label])
    assert (back[has_value & ~is_label] == 0).all()
    assert (back[~has_value] == 7).all()
    (back * torch.arange(36.0).view(SHAPE)).sum().backward()
    gradients = [value.grad for value in values if value.grad is not None]
    weights = padded_from_documents(step.split_by_document(gradients), attended)
    assert torch.equal(weights, torch.where(has_value, torch.arange(36.0).view(SHAPE), 0).double())
    # One batch in the order of the documents, a mask of the other kind.
    whole = TokenBatch.from_documents(documents)
    again = padded_from_documents(
        whole.split_by_document(whole.columns["old_logprobs"]), attended.bool().numpy(), 7.0
    )
    assert torch.equal(again, back.detach())


def test_the_document_is_what_a_padded_model_sees() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=160,
        attn_implementation="sdpa",
    )
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(config).double().eval()
    tokens, attended, _ = _tensors()
    with torch.no_grad():
        logits = model(
            tokens,
            attention_mask=attended,
            position_ids=(attended.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).logits
    expected = torch.zeros(SHAPE, dtype=torch.float64)
    for row in range(6):
        columns = [column for column in range(6) if ATTENDED[row][column]]
        for before, column in itertools.pairwise(columns):
            expected[row, column] = logits[row, before].log_softmax(0)[tokens[row, column]]
    documents = documents_from_padded(tokens, attended, attended)
    pieces = []
    for document in documents:
        (kwargs,) = TokenBatch.from_documents([document]).to_kwargs()
        pieces.append(_logprobs(model, kwargs)[:-1])
    found = padded_from_documents(pieces, attended)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def _logprobs(model: Any, kwargs: BatchKwargs) -> Tensor:
    hidden = model.model(
        kwargs.tokens[None], position_ids=kwargs.positions[None], use_cache=False
    ).last_hidden_state
    return linear_logprobs(hidden[0], model.lm_head.weight, kwargs.labels).logprobs


def _refused(told: str, kind: type[Exception] = ValueError, **changes: Any) -> None:
    tokens, attended, learned = _tensors()
    given: dict[str, Any] = {"tokens": tokens, "attention_mask": attended, "loss_mask": learned}
    with pytest.raises(kind, match=told):
        documents_from_padded(**given | changes)


def test_what_does_not_fit_is_refused_by_name_and_shape() -> None:
    _refused(r"`tokens` must be integers, got float32", tokens=torch.zeros(SHAPE))
    _refused(r"`tokens` must have two dimensions, \[B, L\], got \[6\]", tokens=torch.arange(6))
    _refused(
        r"`attention_mask` must be of shape \[6, 6\] .* got \[6, 5\]",
        attention_mask=torch.ones(6, 5),
    )
    _refused(r"`attention_mask` must be booleans, or 0 and 1", attention_mask=torch.full(SHAPE, 2))
    _refused(
        r"`loss_mask` must be of shape \[6, at most 6\] .* got \[6, 7\]", loss_mask=torch.ones(6, 7)
    )
    _refused(r"`loss_mask` must be booleans, or 0 and 1", loss_mask=torch.full(SHAPE, -100))
    _refused(
        r"`loss_mask` must be 0 where `attention_mask` is, got 18 tokens of which the first is in"
        r" row 0, column 0; multiply the two",
        loss_mask=torch.ones(SHAPE),
    )
    _refused(
        r"`logprobs` must be of shape \[6, 6\] or \[6, 5\] beside `tokens` of \[6, 6\], got"
        r" \[6, 3\]",
        logprobs=torch.zeros(6, 3),
    )
    _refused(
        r"`ref_logprobs` must be of shape \[6, 6\] or \[6, 5\] or \[6, 3\] .* got \[6, 4\]",
        loss_mask=torch.zeros(6, 3),
        ref_logprobs=torch.zeros(6, 4),
    )
    _refused(r"`advantage` must be of shape .* got \[6, 1\]", advantage=torch.zeros(6, 1))
    _refused(
        r"`advantage` must have one value a row \(\[6\]\), got \[5\]", advantage=torch.zeros(5)
    )
    _refused(
        r"`reward` must have one value a row \(\[6\]\), got \[6, 6\]", reward=torch.zeros(SHAPE)
    )
    _refused(r"`group_id` must have one value a row \(\[6\]\), got \[2\]", group_id=["a", "b"])
    _refused(
        "`fields` must be out of .* the field of `old_logprobs` is `logprobs`",
        TypeError,
        old_logprobs=torch.zeros(SHAPE),
    )
    _refused("`fields` must be out of .* got `kept_tokens`$", TypeError, kept_tokens=[])


def test_what_is_no_tensor_is_refused_by_name_and_type() -> None:
    batch = TokenBatch.from_documents([Document([1, 2], prompt_length=1)])
    _refused("`tokens` must be a tensor or array .* got a TokenBatch", TypeError, tokens=batch)
    _refused("`attention_mask` must be a tensor .* got a tuple", TypeError, attention_mask=(1, 2))
    _refused("`logprobs` must be a tensor .* got a list", TypeError, logprobs=[[1.0]])
    _refused(
        "`reward` must have one value a row .* got a Identity", TypeError, reward=nn.Identity()
    )


def test_values_of_other_documents_are_refused() -> None:
    _, attended, _ = _tensors()
    right = [torch.zeros(n) for n in (3, 2, 3, 0, 5)]
    padded_from_documents(right, attended)
    with pytest.raises(
        ValueError, match=r"must have \[3, 2, 3, 0, 5\] values .* 5 rows .* got \[3\]"
    ):
        padded_from_documents(right[:1], attended)
    with pytest.raises(ValueError, match=r"got \[3, 2, 3, 0, 6\]"):
        padded_from_documents([*right[:-1], torch.zeros(6)], attended)
    many = np.ones((20, 2))
    with pytest.raises(ValueError, match=r"must have \[1, 1, 1, 1, 1, 1, 1, 1, \.\.\.\] values"):
        padded_from_documents([], many)
