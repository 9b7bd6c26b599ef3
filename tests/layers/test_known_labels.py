"""What is known of a batch's labels on the host: a bound of them, and that all rows have one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.cases import SHAPES, make_batch
from fastrl import Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
from fastrl.config.policy_losses import GRPOLossConfig
from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.functional.statistics import TokenStatistics
from fastrl.functional.streams import of_stream
from fastrl.layers.losses.clipped import GRPOLoss
from fastrl.layers.losses.policy_terms import weighted


def _batch(largest: int = 9) -> BatchKwargs:
    documents = [
        Document([1, 2, 3, largest, 0], prompt_length=2, advantage=1.0, logprobs=[-1.0] * 3),
        Document([1, 2], prompt_length=1, advantage=0.0, logprobs=[-1.0]),
    ]
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    return batch


def _head(vocab_size: int) -> LanguageModelHead:
    values = {"hidden_size": 4, "vocab_size": vocab_size, "losses": {"policy": {"type": "grpo"}}}
    return LanguageModelHead(LanguageModelHeadConfig.model_validate(values))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_label_outside_the_vocabulary_is_refused(is_known: bool) -> None:
    batch = _batch(largest=9)
    assert batch.label_bound == 10
    batch = batch if is_known else replace(batch, label_facts=None)
    hidden = torch.zeros(batch.num_tokens, 4)
    _head(10)(hidden, batch)
    message = r"`labels` must be -100 \(none\) or in \[0, 9\), got 9; is `vocab_size` that of the"
    with pytest.raises(ValueError, match=message):
        _head(9)(hidden, batch)


def test_other_labels_are_looked_at_again() -> None:
    batch = _batch().replace(labels=torch.tensor([-100, 3, 12, -100, -100, 2, -100]))
    assert batch.label_bound is None
    with pytest.raises(ValueError, match="got 12"):
        _head(10)(torch.zeros(7, 4), batch)


def test_facts_are_of_the_labels_that_they_were_found_for() -> None:
    batch = _batch()
    assert batch.to("cpu").label_bound == batch.select(slice(2, 5)).label_bound == 10
    other = torch.tensor([-100, 3, 12, -100, -100, 2, -100])
    assert replace(batch, labels=other).label_bound is None
    batch.labels[2] = 12
    assert batch.label_bound is None
    with pytest.raises(ValueError, match="got 12"):
        _head(10)(torch.zeros(7, 4), batch)


def test_labels_below_0_are_not_known() -> None:
    tokens = TokenBatch.from_documents([Document([1, 2, 3], prompt_length=1, advantage=1.0)])
    (batch,) = replace(tokens, labels=torch.tensor([2, -5, -100])).to_kwargs()
    assert batch.label_bound is None


@pytest.mark.parametrize("strategy", ["single_pass", "recompute"])
def test_labels_that_are_taken_away_in_place_count_nothing(strategy: str) -> None:
    values = {"type": "grpo"}
    config = {"hidden_size": 4, "vocab_size": 10, "strategy": strategy, "losses": {"p": values}}
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config))
    hidden, batch = torch.randn(7, 4), _batch()
    batch.labels[2] = -100
    output = head(hidden, batch)
    assert output.loss is not None
    torch.testing.assert_close(output.loss.detach(), output.metrics["p/loss"].to(output.loss.dtype))


def test_a_loss_may_narrow_the_mask() -> None:
    batch = make_batch(SHAPES["tiny"])
    compact = batch.select(batch.rows_with_labels)
    assert compact.all_labelled
    loss = GRPOLoss(GRPOLossConfig())
    zeros = torch.zeros(compact.num_tokens)
    terms = loss.prepare(TokenStatistics(zeros, None, zeros), compact)
    ones = torch.ones(compact.num_tokens)
    assert weighted(ones, terms) is ones
    narrow = replace(terms, mask=terms.mask & (torch.arange(compact.num_tokens) > 3))
    assert weighted(ones, narrow).sum() == compact.num_tokens - 4


def test_known_labels_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastrl.functional.head.checks.require_all", None)
    _head(10)(torch.zeros(7, 4), _batch())
    with pytest.raises(TypeError, match="not callable"):
        _head(10)(torch.zeros(7, 4), replace(_batch(), label_facts=None))


def test_rows_of_the_batchs_own_sets_all_have_a_label() -> None:
    batch = make_batch(SHAPES["tiny"])
    assert not batch.all_labelled
    assert batch.active_rows is not None
    compact = batch.select(batch.active_rows)
    assert compact.all_labelled
    assert (compact.labels != -100).all()
    assert compact.select(slice(3, 9)).all_labelled
    foreign = RowSet(index=torch.arange(4), document_ends=(4,))
    assert not batch.select(foreign).all_labelled
    assert not batch.select(batch.active_rows.index).all_labelled
    assert not batch.span(0, batch.num_tokens).all_labelled
    labels = torch.full_like(compact.labels, -100)
    assert not compact.replace(labels=labels).all_labelled


def test_a_streams_rows_may_have_none() -> None:
    documents = [Document([1, 2, 3, 4], prompt_length=1, ce_weight=[0.0, 1.0, 0.0])]
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    assert batch.labelled_rows is not None
    compact = batch.select(batch.labelled_rows)
    assert compact.all_labelled
    stream = of_stream(compact, "ce")
    assert not stream.all_labelled
    assert stream.labels.tolist() == [-100, 3, -100]
    # Its row sets are those of all labels.
    assert not of_stream(batch, "ce").select(batch.labelled_rows).all_labelled
