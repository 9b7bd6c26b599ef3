"""A head without parameters: the weight in the call, as a tensor or as its module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastrl import BatchKwargs, Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
from tests.helpers.batches import pack
from tests.helpers.lora import lora_layer

D, V = 16, 37
LOSSES: dict[str, Any] = {"policy": {"type": "gspo"}, "answers": {"type": "cross_entropy"}}
DOCUMENTS = [
    Document(tokens=[5, 3, 8, 1, 9], prompt_length=2, logprobs=[-1.2, -0.4, -2.0], advantage=0.7),
    Document(tokens=[5, 3, 7], prompt_length=2, logprobs=[-0.9], advantage=-0.7),
]


def make(owns_weight: bool, **options: Any) -> LanguageModelHead:
    config = LanguageModelHeadConfig(hidden_size=D, vocab_size=V, losses=LOSSES, **options)
    dtype = torch.float64 if owns_weight else None
    return LanguageModelHead(config, dtype=dtype, owns_weight=owns_weight)


def hidden_of(batch: BatchKwargs, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch.num_tokens, D, dtype=dtype, generator=generator, requires_grad=True)


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
@pytest.mark.parametrize("form", ["tensor", "linear", "bias"])
def test_it_is_the_head_with_that_weight(strategy: str, form: str) -> None:
    batch = pack(DOCUMENTS)
    own = make(True, strategy=strategy, bias=form == "bias")
    layer = nn.Linear(D, V, bias=form == "bias", dtype=torch.float64)
    layer.load_state_dict({name: value.detach() for name, value in own.state_dict().items()})
    guest = make(False, strategy=strategy)
    assert list(guest.parameters()) == []
    results = []
    for head, arguments, weights in (
        (own, {}, list(own.parameters())),
        (guest, {"weight": layer.weight if form == "tensor" else layer}, list(layer.parameters())),
    ):
        hidden = hidden_of(batch)
        output = head(hidden, batch, **arguments)
        assert output.strategy == strategy
        grads = torch.autograd.grad(-1.7 * output.loss, [hidden, *weights])
        results.append([output.loss, *output.metrics.values(), *grads])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_padded_hidden_states_are_those_of_the_batch_in_order() -> None:
    batch = pack(DOCUMENTS)
    head, hidden = make(True), hidden_of(batch)
    one, other = head(hidden, batch), head(hidden[None], batch)
    torch.testing.assert_close(one.loss, other.loss, rtol=0, atol=0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_lora_trains_a_and_b_with_every_loss(has_bias: bool) -> None:
    """Through LoRA's own forward, with log-probabilities of its logits in the same losses."""
    layer = lora_layer(nn.Linear(D, V, bias=has_bias, dtype=torch.float64))
    merged = nn.Linear(D, V, bias=has_bias, dtype=torch.float64)
    batch = pack(DOCUMENTS)
    hidden = hidden_of(batch)
    head = make(False)
    output = head(hidden, batch, weight=layer, return_logprobs=True)
    assert output.strategy == "recompute"
    a, b = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    found = torch.autograd.grad(1.3 * output.loss, [hidden, a, b])
    with torch.no_grad():
        merged.weight.copy_(layer.base_layer.weight + layer.scaling["default"] * b @ a)
        if has_bias:
            merged.bias.copy_(layer.base_layer.bias)
    truth = head(hidden, batch, weight=merged, return_logprobs=True)
    torch.testing.assert_close(output.loss, truth.loss)
    torch.testing.assert_close(output.logprobs, truth.logprobs)
    torch.testing.assert_close(output.metrics, truth.metrics)
    grad_hidden, grad = torch.autograd.grad(1.3 * truth.loss, [hidden, merged.weight])
    scaling = layer.scaling["default"]
    torch.testing.assert_close(
        list(found), [grad_hidden, scaling * b.T @ grad, scaling * grad @ a.T]
    )
    with pytest.raises(ValueError, match="LoRA on the output layer takes slabs"):
        make(False, strategy="single_pass")(hidden, batch, weight=layer)


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_compute_dtype_rounds_operands_alone(strategy: str, chunk_size: int | None) -> None:
    if strategy == "single_pass" and chunk_size is not None:
        chunk_size = 3  # whole documents
    batch = pack(DOCUMENTS)
    layer = nn.Linear(D, V)
    options: dict[str, Any] = {"strategy": strategy, "chunk_size": chunk_size}
    hidden = hidden_of(batch, torch.float32)
    output = make(False, **options)(hidden, batch, weight=layer, compute_dtype=torch.bfloat16)
    tensors = [hidden, layer.weight, layer.bias]
    found = torch.autograd.grad(3 * output.loss, tensors)
    rounded = [tensor.detach().bfloat16().double().requires_grad_() for tensor in tensors[:2]]
    rounded.append(layer.bias.detach().double().requires_grad_())
    truth = make(False, **options)(rounded[0], batch, weight=rounded[1], bias=rounded[2])
    torch.testing.assert_close(output.loss.double(), truth.loss.double(), rtol=1e-5, atol=1e-6)
    for grad, expected in zip(found, torch.autograd.grad(3 * truth.loss, rounded), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - expected).norm() < 4e-3 * expected.norm()
        assert not torch.equal(grad, grad.bfloat16().float())


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_b5_a_head_in_evaluation_mode_trains_where_asked_to(strategy: str) -> None:
    batch, layer = pack(DOCUMENTS), nn.Linear(D, V, dtype=torch.float64)
    hidden, head = hidden_of(batch), make(False, strategy=strategy)
    tensors = [hidden, layer.weight, layer.bias]
    expected = torch.autograd.grad(-1.7 * head(hidden, batch, weight=layer).loss, tensors)
    head.eval()
    assert head(hidden, batch, weight=layer).loss is None
    output = head(hidden, batch, weight=layer, compute_loss=True)
    found = torch.autograd.grad(-1.7 * output.loss, tensors)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_loss_in_evaluation_mode_is_asked_for() -> None:
    batch, head = pack(DOCUMENTS), make(True).eval()
    hidden = hidden_of(batch)
    assert head(hidden, batch).loss is None
    output = head(hidden, batch, compute_loss=True)
    torch.testing.assert_close(output.loss, head.train()(hidden, batch).loss, rtol=0, atol=0)
    assert output.logprobs is None
    alone = head(hidden, batch, compute_loss=False)
    assert alone.loss is None
    assert alone.metrics == {}
    assert alone.logprobs is not None
    head.set_losses({})
    with pytest.raises(ValueError, match="`compute_loss` must not be True without losses"):
        head(hidden, batch, compute_loss=True)


def test_arguments_that_do_not_belong_are_refused() -> None:
    batch = pack(DOCUMENTS)
    hidden, weight = hidden_of(batch), torch.zeros(V, D, dtype=torch.float64)
    with pytest.raises(ValueError, match="`weight` must be given to a head without parameters"):
        make(False)(hidden, batch)
    with pytest.raises(ValueError, match="`weight` and `bias` must not be given to a head that"):
        make(True)(hidden, batch, weight=weight)
    with pytest.raises(ValueError, match="`device`, `dtype` and `bias` of the config must not"):
        make(False, bias=True)
    with pytest.raises(TypeError, match="`batch` must be a BatchKwargs, got a TokenBatch"):
        make(True)(hidden, TokenBatch.from_documents(DOCUMENTS))
    with pytest.raises(TypeError, match="`hidden_states` must be a tensor, got a tuple"):
        make(True)((hidden,), batch)
