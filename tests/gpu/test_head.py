"""The head on a GPU: both ways of computing, sizes beyond 32 bits, and no wait for the device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fastrl import Document, TokenBatch, linear_logprobs
from tests.helpers.bf16_heads import BF16, grpo_batch, grpo_head
from tests.helpers.tile_cases import relative_error

pytestmark = pytest.mark.gpu

STRATEGIES = ("single_pass", "recompute")


@pytest.mark.parametrize("entropy", [0.0, 0.01], ids=["", "entropy"])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("bias", [False, True])
def test_strategies_agree(entropy: float, softcap: float | None, bias: bool) -> None:
    batch = grpo_batch(6, 90, 1000)
    hidden = torch.randn(batch.num_tokens, 128, device="cuda", dtype=BF16, requires_grad=True)
    results = []
    for strategy, chunk in (("recompute", None), ("single_pass", None), ("single_pass", 100)):
        torch.manual_seed(1)
        loss: dict[str, Any] = {"type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
        if entropy:
            loss["entropy"] = {"bonus": entropy}
        head = grpo_head(
            128, 1000, strategy=strategy, chunk_size=chunk, softcap=softcap, bias=bias,
            losses={"policy": loss}, logit_scale=3.0,
        )  # fmt: skip
        output = head(hidden, batch, return_logprobs=True)
        assert output.loss is not None
        inputs = [hidden, *head.parameters()]
        results.append((output, torch.autograd.grad(2.5 * output.loss, inputs)))
    (first, first_grads), *others = results
    for other, grads in others:
        torch.testing.assert_close(other.loss, first.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other.logprobs, first.logprobs, rtol=1e-6, atol=2e-6)
        for grad, first_grad in zip(grads, first_grads, strict=True):
            assert relative_error(grad, first_grad) < 5e-3


@pytest.mark.parametrize("metrics", [False, True], ids=["", "metrics"])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_waits_for_the_device(strategy: str, loss: str, metrics: bool) -> None:
    batch = grpo_batch(6, 90, 1000)
    head = grpo_head(
        128, 1000, strategy=strategy, metrics=metrics, losses={"policy": {"type": loss}}
    )
    hidden = torch.randn(batch.num_tokens, 128, device="cuda", dtype=BF16, requires_grad=True)
    upstream = torch.tensor(0.5, device="cuda")
    for _ in range(2):  # kernels are compiled and loaded by the first
        output = head(hidden, batch, return_logprobs=metrics)
        assert output.loss is not None
        output.loss.backward(upstream)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # it says that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        output = head(hidden, batch, return_logprobs=metrics)
        assert output.loss is not None
        output.loss.backward(upstream)
        with torch.no_grad():
            head.eval()(hidden, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "vocab_size", [1, 2, 127, 128, 129, 130, 255, 257, 1000, 32000, 129920, 151936, 256000]
)
def test_v1_padding_of_tiles_is_no_logit(vocab_size: int) -> None:
    hidden = torch.zeros(130, 64, device="cuda", dtype=BF16)
    hidden[:, 0] = 1
    weight = torch.zeros(vocab_size, 64, device="cuda", dtype=BF16)
    weight[:, 0] = -50
    labels = torch.arange(130, device="cuda") % vocab_size
    hidden.requires_grad_()
    weight.requires_grad_()
    statistics = linear_logprobs(hidden, weight, labels, entropy=True)
    expected = -torch.tensor(float(vocab_size)).log().item()
    torch.testing.assert_close(
        statistics.logprobs, torch.full_like(statistics.logprobs, expected), rtol=2e-6, atol=1e-6
    )
    assert (statistics.logprobs <= 0).all()
    torch.testing.assert_close(
        statistics.entropy, torch.full_like(statistics.logprobs, -expected), rtol=2e-6, atol=1e-6
    )
    grad_hidden, grad_weight = torch.autograd.grad(statistics.logprobs.sum(), (hidden, weight))
    assert grad_hidden.abs().max() <= 50 * 2e-2
    counts = torch.bincount(labels, minlength=vocab_size) - 130 / vocab_size
    torch.testing.assert_close(grad_weight[:, 0].float(), counts.float(), rtol=8e-3, atol=4e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("depth", [64, 60], ids=["fused", "rows"])
def test_h1_more_logits_than_32_bits_count(strategy: str, depth: int) -> None:
    """(a) N V = 16385 x 131072 in one chunk: the last rows equal a small head's over them."""
    num_rows, vocab_size = 16385, 131072
    labels = torch.randint(vocab_size, (num_rows + 1,)).tolist()
    document = Document(tokens=labels, prompt_length=1, logprobs=[-11.7] * num_rows, advantage=1.0)
    (batch,) = TokenBatch.from_documents([document]).to_kwargs()
    batch = batch.to("cuda")
    head = grpo_head(depth, vocab_size, strategy=strategy, max_logits_bytes=2**34, metrics=False)
    hidden = torch.randn(num_rows + 1, depth, device="cuda", dtype=BF16, requires_grad=True)
    output = head(hidden, batch, return_logprobs=True)
    assert output.loss is not None
    (grad,) = torch.autograd.grad(output.loss, hidden)
    last = slice(num_rows - 5, num_rows)
    logits = (hidden[last].detach().double() @ head.weight.detach().double().t()).requires_grad_()
    logprobs = torch.log_softmax(logits, 1).gather(1, batch.labels[last][:, None])[:, 0]
    assert output.logprobs is not None
    torch.testing.assert_close(output.logprobs[last].double(), logprobs, rtol=1e-6, atol=1e-5)
    ratio = (logprobs + 11.7).exp()
    loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum() / num_rows
    (grad_logits,) = torch.autograd.grad(loss, logits)
    assert relative_error(grad[last], grad_logits @ head.weight.double()) < 4e-3


def test_h1_a_weight_of_more_elements_than_32_bits_count() -> None:
    """(b) V D = 262144 x 8200, labels in the last rows."""
    vocab_size, depth = 262144, 8200
    weight = torch.empty(vocab_size, depth, device="cuda", dtype=BF16).normal_(std=0.02)
    hidden = torch.randn(5, depth, device="cuda", dtype=BF16)
    weight.requires_grad_()
    labels = vocab_size - 1 - torch.arange(5, device="cuda")
    statistics = linear_logprobs(hidden, weight, labels)
    (grad,) = torch.autograd.grad(statistics.logprobs.sum(), weight)
    with torch.no_grad():
        logits = torch.cat([hidden.double() @ w.double().t() for w in weight.split(16384)], 1)
        p = torch.softmax(logits, 1)
        expected = torch.log(p.gather(1, labels[:, None]))[:, 0]
        # The tensor cores' sums over 8200 products are no better than this.
        torch.testing.assert_close(statistics.logprobs.double(), expected, rtol=0, atol=3e-4)
        last = torch.nn.functional.one_hot(labels - vocab_size + 100, 100) - p[:, -100:]
        assert relative_error(grad[-100:], last.t() @ hidden.double()) < 4e-3


def test_h1_hidden_states_of_more_elements_than_32_bits_count() -> None:
    """(c) T D = 270000 x 8192, labels in the last tokens; and more rows than a grid's y axis."""
    num_tokens, depth = 270000, 8192
    hidden = torch.zeros(num_tokens, depth, device="cuda", dtype=BF16)
    hidden[-40:].normal_()
    hidden.requires_grad_()
    weight = torch.randn(1000, depth, device="cuda", dtype=BF16) * 0.02
    labels = torch.full((num_tokens,), -100, device="cuda")
    labels[-40:] = torch.arange(40, device="cuda")
    statistics = linear_logprobs(hidden, weight, labels)
    logits = hidden[-40:].detach().double() @ weight.double().t()
    expected = torch.log_softmax(logits, 1).gather(1, labels[-40:, None])[:, 0]
    torch.testing.assert_close(statistics.logprobs[-40:].double(), expected, rtol=0, atol=3e-4)
    (grad,) = torch.autograd.grad(statistics.logprobs.sum(), hidden)
    onehot = torch.nn.functional.one_hot(labels[-40:], 1000)
    true = (onehot - torch.softmax(logits, 1)) @ weight.double()
    assert relative_error(grad[-40:], true) < 4e-3
    assert grad[:-40].count_nonzero() == 0


def test_more_rows_and_documents_than_16_bits_count() -> None:
    batch = grpo_batch(70_000, 3, 100)
    assert batch.num_documents == 70_000
    hidden = torch.randn(batch.num_tokens, 16, device="cuda", dtype=BF16, requires_grad=True)
    results = []
    for loss in ("grpo", "gspo"):
        for strategy in STRATEGIES:
            torch.manual_seed(2)
            wide = {"type": loss, "epsilon_low": 0.99, "epsilon_high": 999.0}
            head = grpo_head(16, 100, strategy=strategy, losses={"policy": wide})
            output = head(hidden, batch)
            assert output.loss is not None
            results.append(torch.autograd.grad(output.loss, hidden)[0])
            assert results[-1].count_nonzero() > 0
    assert relative_error(results[0], results[1]) < 4e-3
    assert relative_error(results[2], results[3]) < 4e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_w3_only_demanded_gradients(strategy: str) -> None:
    """Every combination gives the same loss; a frozen weight costs no memory of its size."""
    batch = grpo_batch(4, 60, 32000)
    head = grpo_head(256, 32000, strategy=strategy, bias=True, max_logits_bytes=2**22)
    assert head.bias is not None
    losses = []
    for needs in (7, *range(8)):  # the first one loads kernels and makes a BLAS's workspace
        hidden = torch.ones(batch.num_tokens, 256, device="cuda", dtype=BF16)
        hidden.requires_grad_(bool(needs & 1))
        head.weight.requires_grad_(bool(needs & 2))
        head.bias.requires_grad_(bool(needs & 4))
        head.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = head(hidden, batch).loss
        assert loss is not None
        losses.append(loss.detach())
        if needs:
            loss.backward()
        if not needs & 2:
            assert torch.cuda.max_memory_allocated() - before < head.weight.nbytes * 0.75
        for tensor in (hidden, head.weight, head.bias):
            assert (tensor.grad is not None) == tensor.requires_grad
    for loss in losses:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        torch.testing.assert_close(head(hidden, batch).loss, losses[0], rtol=1e-6, atol=1e-7)
    with torch.inference_mode():
        torch.testing.assert_close(head(hidden, batch).loss, losses[0], rtol=1e-6, atol=1e-7)
