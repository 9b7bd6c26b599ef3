"""Distillation on a teacher's recorded entries: TRL's numbers, limits, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fastrl import BatchKwargs, Document, LanguageModelHeadConfig, TokenBatch
from fastrl.data.documents import DocumentError
from fastrl.functional.kept_tokens import KeptTokens
from tests.helpers.loss_cases import BY_NAME
from tests.helpers.loss_documents import VOCAB_SIZE, pack, policy_documents, with_recorded_teacher
from tests.helpers.loss_heads import (
    assert_equal_gradients,
    capped_head,
    make_teacher,
    random_hidden,
)

DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward": {"divergence": "forward_kl"},
    "reverse": {"divergence": "reverse_kl"},
    "jensen_shannon": {"divergence": "jensen_shannon", "beta": 0.3},
}
TRL_BETA = {"forward": 0.0, "reverse": 1.0, "jensen_shannon": 0.3}


def recorded_head(name: str, **options: Any) -> Any:
    loss = {"type": "distillation", "recorded": True, **DIVERGENCES[name]}
    return capped_head({"kd": loss}, **options)


def head_logits(head: Any, hidden: Tensor) -> Tensor:  # [T, V]
    z = hidden @ head.weight[:VOCAB_SIZE].t() + head.bias[:VOCAB_SIZE]
    return 5.0 * torch.tanh(z / 5.0)


def dense_entries(batch: BatchKwargs) -> tuple[Tensor, Tensor, Tensor]:
    """[T, V] ids, log-probabilities and which of them are there."""
    entries = batch.teacher_tokens
    assert entries is not None
    assert entries.logprobs is not None
    ids = torch.zeros(batch.num_tokens, VOCAB_SIZE, dtype=torch.int64)
    logprobs = torch.full(ids.shape, -torch.inf, dtype=torch.float64)
    counts = [0] * batch.num_tokens
    for slot, entry, value in zip(
        entries.slots.tolist(), entries.ids.tolist(), entries.logprobs.tolist(), strict=True
    ):
        ids[slot, counts[slot]], logprobs[slot, counts[slot]] = entry, value
        counts[slot] += 1
    return ids, logprobs, logprobs > -torch.inf


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_same_numbers_as_trl(name: str) -> None:
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.server_distillation import server_distillation_trainer as theirs
    documents = with_recorded_teacher(policy_documents())
    # TRL always adds a rest, also where the whole distribution is recorded.
    documents = [
        replace(
            each,
            teacher_ids=[ids[:5] for ids in each.teacher_ids or ()],
            teacher_logprobs=[values[:5] for values in each.teacher_logprobs or ()],
        )
        for each in documents
    ]
    batch = pack(documents)
    hidden = random_hidden(batch).requires_grad_()
    head = recorded_head(name)
    ids, teacher, there = dense_entries(batch)
    student = head_logits(head, hidden).log_softmax(1).gather(1, ids)
    student = torch.where(there, student, -torch.inf)
    student, support = theirs._add_tail_bucket(student, there)
    teacher, _ = theirs._add_tail_bucket(teacher, there)
    values = theirs._jsd_divergence(student, teacher, TRL_BETA[name], support).sum(1)
    labelled = batch.labels != -100
    expected = values[labelled].sum() / labelled.sum()
    assert_equal_gradients(head, hidden, head(hidden, batch).loss, expected, 1e-10)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_whole_vocabulary_is_the_teacher_itself(name: str) -> None:
    batch = pack(policy_documents())
    hidden = random_hidden(batch).requires_grad_()
    teacher = make_teacher(batch)
    assert teacher.bias is not None
    z = teacher.hidden_states @ teacher.weight.t() + teacher.bias
    logprobs = (4.0 * torch.tanh(0.7 * z / 4.0))[:, :VOCAB_SIZE].log_softmax(1)
    ids = torch.arange(VOCAB_SIZE).expand(batch.num_tokens, -1)
    whole = capped_head({"kd": {"type": "distillation", **DIVERGENCES[name]}})
    head = recorded_head(name, chunk_size=3)
    recorded = batch.replace(teacher_tokens=KeptTokens.from_padded(ids, logprobs))
    results = [
        (loss, torch.autograd.grad(loss, [hidden, *each.parameters()]))
        for each, loss in (
            (head, head(hidden, recorded).loss),
            (whole, whole(hidden, batch, teacher=teacher).loss),
        )
    ]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_rest_near_0_keeps_its_digits(name: str) -> None:
    """In fp32, where 1 - sum of the recorded probabilities has none left."""
    document = Document(
        [1, 2], prompt_length=1, teacher_ids=[[2, 3]], teacher_logprobs=[[-0.7, -0.68813904]]
    )
    (batch,) = TokenBatch.from_documents([document]).to_kwargs()
    options = {"softcap": None, "bias": True, "hidden_size": 1, "vocab_size": VOCAB_SIZE}
    results = []
    for dtype in (torch.float32, torch.float64):
        head = recorded_head(name, **options).to(dtype)
        with torch.no_grad():
            head.weight.zero_()
            head.bias.fill_(-30.0)
            head.bias[2:4] = torch.tensor([0.0, 1.0])
        hidden = torch.ones(batch.num_tokens, 1, dtype=dtype)
        loss = head(hidden, batch).loss
        (grad,) = torch.autograd.grad(loss, [head.bias])
        results.append((loss.double(), grad.double()))
    torch.testing.assert_close(*results, rtol=3e-5, atol=0)


def test_the_statistics_are_those_of_a_batch_in_chunks_without_logits() -> None:
    """Forward and backward hold no [T, V] and no [T, K] of padding."""
    case = BY_NAME["distillation_recorded"]
    batch = case.batch()
    hidden = random_hidden(batch).requires_grad_()
    losses = [
        recorded_head("forward", chunk_size=size)(hidden, batch).loss
        for size in (1, 7, batch.num_tokens)
    ]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-12, atol=1e-12)


DOCUMENT = Document(
    [5, 6, 7],
    prompt_length=1,
    teacher_ids=[[1, 2], [3]],
    teacher_logprobs=[[-1.0, -2.0], [-0.5]],
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_logprobs": None}, "`teacher_logprobs` is required beside `teacher_ids`"),
        ({"teacher_ids": None}, "`teacher_ids` is required beside `teacher_logprobs`"),
        ({"teacher_ids": [[1, 1], [3]]}, "`teacher_ids` must be different ids, .* for token 1"),
        ({"teacher_ids": [[], [3]], "teacher_logprobs": [[], [-0.5]]}, "got none for token 1"),
        ({"teacher_ids": [[1, 2], [-3]]}, "`teacher_ids` must hold ids of at least 0"),
        (
            {"teacher_logprobs": [[-1.0], [-0.5]]},
            "one value for each of the 2 `teacher_ids`, got 1",
        ),
        ({"teacher_logprobs": [[-1.0, -0.1], [-0.5]]}, "sum to at most 1, got a sum of 1.27"),
        ({"teacher_logprobs": [[-1.0, -torch.inf], [-0.5]]}, "finite log-prob.* for token 1"),
        ({"teacher_logprobs": [[-1.0, -2.0]]}, "must have 3 .* or 2 .* lists, got 1"),
        ({"logprobs_temperature": 0.5}, "`teacher_logprobs` must be taken at the temperature"),
    ],
)
def test_entries_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        TokenBatch.from_documents([replace(DOCUMENT, **changes)])


def test_entries_of_some_documents_alone_are_refused() -> None:
    without = replace(DOCUMENT, teacher_ids=None, teacher_logprobs=None)
    with pytest.raises(DocumentError, match="1: `teacher_ids` is required, as document 0 has it"):
        TokenBatch.from_documents([DOCUMENT, without])


def test_what_is_missing_or_too_much_is_named() -> None:
    head = recorded_head("forward")
    batch = pack([DOCUMENT])
    hidden = random_hidden(batch)
    assert head(hidden, batch).loss > 0
    with pytest.raises(ValueError, match="`teacher_tokens` must be in the batch with `recorded`"):
        head(hidden, batch.replace(teacher_tokens=None))
    with pytest.raises(ValueError, match="`teacher` must not be given without a loss of type"):
        head(hidden, batch, teacher=make_teacher(batch))
    outside = replace(DOCUMENT, teacher_ids=[[1, VOCAB_SIZE], [3]])
    with pytest.raises(ValueError, match=f"below the vocabulary size {VOCAB_SIZE}, got 29"):
        head(hidden, pack([outside]))
    with pytest.raises(ValueError, match="`strategy: single_pass` must not be given"):
        recorded_head("forward", strategy="single_pass")(hidden, batch)
    entries = batch.teacher_tokens
    assert entries is not None
    with pytest.raises(ValueError, match="`teacher_tokens` must have `logprobs`"):
        batch.replace(teacher_tokens=replace(entries, logprobs=None))
    with pytest.raises(ValueError, match="`teacher_tokens` must be of 8 slots, one a label, got 7"):
        batch.replace(teacher_tokens=entries.padded(7))
    missing = KeptTokens(
        ids=entries.ids[:0],
        slots=entries.slots[:0],
        num_slots=8,
        logprobs=torch.zeros(0),
    )
    with pytest.raises(ValueError, match="for every label, got none for slot 0"):
        head(hidden, batch.replace(teacher_tokens=missing))
    with pytest.raises(ValidationError, match="`logits_scale` must be 1 with `recorded`"):
        LanguageModelHeadConfig.model_validate(
            {
                "hidden_size": 4,
                "vocab_size": 9,
                "losses": {"kd": {"type": "distillation", "recorded": True, "logits_scale": 2.0}},
            }
        )
