"""The value head: against its definition, split, packed in another order, in lower precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fastrl import BatchKwargs, Document, OptimizerStep, TokenBatch, ValueHead
from fastrl.config import ValueLossConfig
from fastrl.layers.losses import add_metrics, finish_metrics
from tests.helpers.loss_heads import HIDDEN_SIZE
from tests.helpers.side_heads import hidden_of, packed_hidden, step_documents, value_reference

OPTIONS: list[dict[str, Any]] = [
    {},
    {"epsilon": None, "weight": 0.4},
    {"epsilon": 0.6, "normalisation": "documents"},
    {"normalisation": "constant", "length": 9},
    {"normalisation": "groups"},
]


def make_head(options: dict[str, Any]) -> ValueHead:
    head = ValueHead(HIDDEN_SIZE, ValueLossConfig(**options), dtype=torch.float64)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(5))
    return head


def whole(documents: list[Document]) -> tuple[BatchKwargs, Tensor]:
    (batch,) = TokenBatch.from_documents(documents, pad_to_multiple=8).to_kwargs()
    return batch, packed_hidden(hidden_of(documents, 1), batch.num_tokens).requires_grad_()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_are_the_definition(options: dict[str, Any]) -> None:
    batch, hidden = whole(step_documents())
    head = make_head(options)
    output = head(hidden, batch)
    expected = value_reference(hidden, head.weight, batch, head.config.model_dump())
    torch.testing.assert_close(output.loss, expected, atol=1e-10, rtol=1e-10)
    inputs = [hidden, head.weight]
    grads = torch.autograd.grad(-1.7 * output.loss, inputs)
    wanted = torch.autograd.grad(-1.7 * expected, inputs)
    torch.testing.assert_close(grads, wanted, atol=1e-10, rtol=1e-10)
    assert not grads[0][batch.labels == -100].any()
    labelled = batch.labels != -100
    values = torch.where(labelled, hidden @ head.weight[0], 0)
    torch.testing.assert_close(output.values, values.detach(), atol=1e-12, rtol=1e-12)
    metrics = finish_metrics(output.metrics)
    assert 0 < metrics.get("value/clip_fraction", 0.5) < 1
    assert batch.returns is not None
    error, returns = (batch.returns - values)[labelled], batch.returns[labelled]
    explained = 1 - error.var(unbiased=False) / returns.var(unbiased=False)
    torch.testing.assert_close(metrics["value/explained_variance"], explained.detach())
    torch.testing.assert_close(metrics["value/value"], values[labelled].mean().detach())


@pytest.mark.parametrize("options", [{}, {"normalisation": "documents"}], ids=str)
def test_micro_batches_order_and_packing_change_nothing(options: dict[str, Any]) -> None:
    documents = step_documents()
    batch, hidden = whole(documents)
    head = make_head(options)
    expected = head(hidden, batch)
    wanted = torch.autograd.grad(expected.loss, head.weight)
    order = [5, 2, 7, 0, 6, 1, 3, 4]
    states = hidden_of(documents, 1)
    step = OptimizerStep([_packed(documents, order[i : i + 3]) for i in (0, 3, 6)])
    parts, losses = [], []
    for number, part in enumerate(step):
        numbers = order[3 * number : 3 * number + 3]
        packed = packed_hidden([states[index] for index in numbers], part.num_tokens)
        output = head(packed, part)
        losses.append(output.loss)
        parts.append(output.metrics)
    loss = torch.stack(losses).sum()
    torch.testing.assert_close(loss, expected.loss, atol=1e-10, rtol=1e-10)
    grads = torch.autograd.grad(loss, head.weight)
    torch.testing.assert_close(grads, wanted, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(
        finish_metrics(add_metrics(parts)), finish_metrics(expected.metrics), atol=1e-10, rtol=1e-10
    )


def _packed(documents: list[Document], numbers: list[int]) -> TokenBatch:
    return TokenBatch.from_documents([documents[number] for number in numbers])


def test_sums_are_in_fp32_beside_bf16_hidden_states() -> None:
    batch, hidden = whole(step_documents())
    low = hidden.detach().bfloat16().requires_grad_()
    wide = low.detach().double().requires_grad_()
    head = make_head({}).bfloat16()
    reference = make_head({})
    with torch.no_grad():
        reference.weight.copy_(head.weight)
    output, expected = head(low, batch), reference(wide, batch)
    assert output.values.dtype == torch.float32
    torch.testing.assert_close(output.values.double(), expected.values, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad(output.loss, head.weight)
    (wanted,) = torch.autograd.grad(expected.loss, reference.weight)
    torch.testing.assert_close(grad.double(), wanted, atol=4e-3, rtol=4e-3)
    mixed = make_head({}).float()  # a wider weight beside 16-bit hidden states
    assert mixed(low, batch).loss.dtype == torch.float64  # of the batch's columns
    assert torch.autograd.grad(mixed(low, batch).loss, mixed.weight)[0].dtype == torch.float32


def test_what_has_no_label_has_no_say() -> None:
    batch, hidden = whole(step_documents())
    head = make_head({})
    expected = head(hidden, batch)
    spoiled = torch.where((batch.labels == -100)[:, None], torch.nan, hidden.detach())
    output = head(spoiled.requires_grad_(), batch)
    torch.testing.assert_close(output.loss, expected.loss, atol=0, rtol=0)
    output.loss.backward()
    assert spoiled.grad is not None
    assert spoiled.grad.isfinite().all()
    assert head.weight.grad is not None
    assert head.weight.grad.isfinite().all()


def test_an_evaluation_gives_values_alone_and_needs_no_columns() -> None:
    documents = [replace(document, values=None, returns=None) for document in step_documents()]
    batch, hidden = whole(documents)
    head = make_head({})
    head.eval()
    output = head(hidden[None], batch)
    assert (output.loss, output.metrics) == (None, {})
    head.train()
    with pytest.raises(ValueError, match="`returns` must be in the batch for the ValueLoss"):
        head(hidden, batch)


def test_what_does_not_fit_is_refused() -> None:
    batch, hidden = whole(step_documents())
    head = make_head({})
    with pytest.raises(ValueError, match="`hidden_states` must be those of the batch's"):
        head(hidden[:-1], batch)
    with pytest.raises(ValueError, match="`hidden_states` must be bf16, fp16, fp32 or float64"):
        head(hidden[:, :-1], batch)
    with pytest.raises(TypeError, match="`batch` must be a BatchKwargs"):
        head(hidden, TokenBatch.from_documents([]))
    with pytest.raises(ValidationError, match="`logits_scale` must not be given to a value loss"):
        ValueLossConfig(logits_scale=2.0)
