"""Faults that users met in other heads, each with the right value; named after their ids."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastrl import linear_logprobs

LN3 = math.log(3.0)


def from_logits(
    logits: list[list[float]], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Hidden states and weight whose product is `logits`: the logits themselves and identity."""
    hidden = torch.tensor(logits, dtype=dtype, requires_grad=True)
    return hidden, torch.eye(hidden.shape[1], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 5, 6])
def test_n10_chunks_change_nothing(chunk_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, -100, 4, 2, -100, 1])

    def run(chunk_size: int | None) -> tuple[Tensor, ...]:
        logprobs = linear_logprobs(hidden, weight, labels, chunk_size=chunk_size).logprobs
        assert logprobs.shape == (6,)
        loss = -(logprobs + 1.5)[labels >= 0].exp().mean()
        return (loss, *torch.autograd.grad(loss, [hidden, weight]))

    for actual, expected in zip(run(chunk_size), run(None), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


def test_m1_labels_belong_to_their_slots() -> None:
    tokens = torch.tensor([3, 1, 4, 2, 5])
    hidden = torch.zeros(5, 6)
    hidden[torch.arange(4), tokens[1:]] = 10.0
    labels = torch.tensor([-100, -100, 2, 5, -100])
    logprobs = linear_logprobs(hidden, torch.eye(6), labels).logprobs
    expected = torch.tensor([0, 0, -0.000227, -0.000227, 0])
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)


def test_p1_slots_without_label_get_exactly_no_gradient() -> None:
    hidden = torch.randn(5, 3, requires_grad=True)
    labels = torch.tensor([11, 12, -100, 21, -100])
    linear_logprobs(hidden, torch.randn(30, 3), labels).logprobs.sum().backward()
    assert hidden.grad is not None
    assert (hidden.grad == 0).all(1).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([LN3, 0, -math.inf], 0.562335),
        ([0, 0, -math.inf], math.log(2)),
        ([1, 0, -math.inf], 0.582203),
        ([-math.inf, -math.inf, 0], 0.0),
    ],
)
@pytest.mark.parametrize("max_logits_bytes", [2**20, 8])
def test_f1_entropy_of_impossible_entries(
    logits: list[float], expected: float, max_logits_bytes: int
) -> None:
    bias = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    hidden = torch.zeros(1, 1, dtype=torch.float64)
    entropy = linear_logprobs(
        hidden,
        torch.zeros(3, 1, dtype=torch.float64),
        torch.tensor([2 if logits[0] == -math.inf else 0]),
        bias=bias,
        entropy=True,
        max_logits_bytes=max_logits_bytes,
    ).entropy
    assert entropy is not None
    torch.testing.assert_close(entropy.item(), expected, atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(entropy.sum(), [bias])
    assert grad.isfinite().all()
    if logits[0] == 1:
        wanted = torch.tensor([-0.196612, 0.196612, 0], dtype=torch.float64)
        torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=0)


def test_f1_entropy_of_float16_extremes() -> None:
    hidden, weight = from_logits([[60000, -60000]], torch.float16)
    statistics = linear_logprobs(hidden, weight, torch.tensor([0]), entropy=True)
    assert statistics.entropy is not None
    assert statistics.entropy.item() == 0
    assert statistics.logprobs.item() == 0
    (grad,) = torch.autograd.grad(statistics.entropy.sum(), [hidden])
    assert grad.isfinite().all()


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 130, 255, 257, 1000, 129920])
def test_v1_tile_padding_is_no_part_of_the_softmax(vocab_size: int) -> None:
    hidden = torch.full((2, 1), -50.0, requires_grad=True)
    weight = torch.ones(vocab_size, 1, requires_grad=True)
    statistics = linear_logprobs(hidden, weight, torch.tensor([0, -100]), max_logits_bytes=2**16)
    torch.testing.assert_close(statistics.logprobs[0].item(), -math.log(vocab_size))
    (grad,) = torch.autograd.grad(statistics.logprobs.sum(), [weight])
    dense = torch.full((vocab_size, 1), 50.0 / vocab_size)
    dense[0] -= 50.0
    torch.testing.assert_close(grad, dense, atol=1e-5, rtol=1e-5)


def test_v5_padding_rows_of_the_weight() -> None:
    hidden = torch.zeros(1, 4)
    weight = torch.randn(6, 4, requires_grad=True)
    label = torch.tensor([0])
    trimmed = linear_logprobs(hidden, weight, label, vocab_size=4).logprobs
    whole = linear_logprobs(hidden, weight, label).logprobs
    torch.testing.assert_close(trimmed.item(), -1.386294, atol=1e-6, rtol=0)
    torch.testing.assert_close(whole.item(), -1.791759, atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(
        linear_logprobs(torch.ones(1, 4), weight, label, vocab_size=4).logprobs.sum(), [weight]
    )
    assert grad[4:].count_nonzero() == 0
    assert grad[:4].count_nonzero() == 16
    with pytest.raises(ValueError, match="got 4"):
        linear_logprobs(hidden, weight, torch.tensor([4]), vocab_size=4)


@pytest.mark.parametrize(("depth", "spread"), [(16, 1.0), (256, 0.1)])
def test_i1_same_call_twice_is_bit_equal_and_shapes_agree(
    depth: int, spread: float, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, depth, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(1000, depth, generator=generator) * spread).to(device, torch.bfloat16)
    weight.requires_grad_()
    labels = torch.randint(1000, (64,), generator=generator).to(device)
    old = linear_logprobs(hidden, weight, labels).logprobs
    assert torch.equal(old, linear_logprobs(hidden, weight, labels).logprobs)
    with torch.no_grad():
        assert torch.equal(old, linear_logprobs(hidden, weight, labels).logprobs)
    order = torch.randperm(64, generator=generator).to(device)
    variants = [linear_logprobs(hidden[order], weight, labels[order]).logprobs[order.argsort()]]
    for size in (1, 8, 64):
        variants.append(linear_logprobs(hidden, weight, labels, chunk_size=size).logprobs)
        parts = [
            linear_logprobs(some_hidden, weight, some_labels).logprobs
            for some_hidden, some_labels in zip(hidden.split(size), labels.split(size), strict=True)
        ]
        variants.append(torch.cat(parts))
    for logprobs in variants:
        ratio = (logprobs - old).exp()
        assert (ratio - 1).abs().max() <= 1e-5


def test_i3_weight_gradient_of_many_chunks_is_summed_in_fp32(device: torch.device) -> None:
    hidden = torch.full((1024, 1), 0.01, device=device).bfloat16()
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    labels = torch.zeros(1024, dtype=torch.int64, device=device)
    # Two equal logits: d logprob / d weight[0] = (1 - 1/2) hidden.
    logprobs = linear_logprobs(hidden, weight, labels, chunk_size=1).logprobs
    (grad,) = torch.autograd.grad(2 * logprobs.sum(), [weight])
    exact = 1024 * torch.tensor(0.01).bfloat16().double()
    assert grad[0].item() == exact.bfloat16().item() == 10.25


def test_t1_temperature_scales_value_and_gradient_once() -> None:
    hidden, weight = from_logits([[2.0, 0.0]])
    logprobs = linear_logprobs(hidden, weight, torch.tensor([0]), temperature=0.5).logprobs
    torch.testing.assert_close(logprobs.item(), -0.018150, atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(logprobs.sum(), [hidden])
    torch.testing.assert_close(grad[0, 0].item(), 0.035972, atol=1e-6, rtol=0)


def test_t4_entropy_is_that_of_the_trained_distribution() -> None:
    hidden, weight = from_logits([[2.0, 0.0]])
    before = hidden.detach().clone()
    label = torch.tensor([0])
    statistics = linear_logprobs(hidden, weight, label, temperature=0.5, entropy=True)
    assert statistics.entropy is not None
    torch.testing.assert_close(statistics.entropy.item(), 0.090095, atol=1e-6, rtol=0)
    alone = linear_logprobs(hidden, weight, label, temperature=0.5)
    assert torch.equal(alone.logprobs, statistics.logprobs)
    assert alone.entropy is None
    assert torch.equal(hidden, before)


def test_s1_softcap_bounds_the_logits() -> None:
    hidden, weight = from_logits([[90.0, 0.0]])
    logprobs = linear_logprobs(hidden, weight, torch.tensor([1]), softcap=20.0).logprobs
    torch.testing.assert_close(logprobs.item(), -19.995064, atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(logprobs.sum(), [hidden])
    slope = 1 - math.tanh(90 / 20) ** 2
    torch.testing.assert_close(grad[0, 0].item(), -slope, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("max_logits_bytes", [2**20, 8])
def test_s4_bias_counts_and_is_trained(max_logits_bytes: int) -> None:
    bias = torch.tensor([LN3, 0.0], dtype=torch.float64, requires_grad=True)
    logprobs = linear_logprobs(
        torch.ones(1, 1, dtype=torch.float64),
        torch.zeros(2, 1, dtype=torch.float64),
        torch.tensor([0]),
        bias=bias,
        max_logits_bytes=max_logits_bytes,
    ).logprobs
    torch.testing.assert_close(logprobs.item(), math.log(0.75))
    (grad,) = torch.autograd.grad(logprobs.sum(), [bias])
    torch.testing.assert_close(grad, torch.tensor([0.25, -0.25], dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "depth"),
    [(torch.float64, 2), (torch.bfloat16, 2), (torch.bfloat16, 8)],
    ids=["float64", "bf16", "bf16 fused"],
)
@pytest.mark.parametrize("form", ["plain", "expanded", "strided"])
def test_w1_each_token_has_its_own_upstream_gradient(
    form: str, dtype: torch.dtype, depth: int, device: torch.device
) -> None:
    hidden = torch.eye(2, depth, dtype=dtype, device=device, requires_grad=True)
    weight = torch.eye(2, depth, dtype=dtype, device=device, requires_grad=True)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    logprobs = linear_logprobs(hidden, weight, labels).logprobs
    upstream, first_row = logprobs.new_tensor([0.0, -2.0]), [0.0, 0.0]
    if form == "expanded":
        upstream, first_row = logprobs.new_tensor([-2.0]).expand(2), [-0.537883, 0.537883]
    elif form == "strided":
        upstream = logprobs.new_tensor([0.0, 7.0, -2.0, 7.0])[::2]
    expected = torch.zeros(2, depth, dtype=torch.float64, device=device)
    expected[:, :2] = torch.tensor([first_row, [-1.462117, 1.462117]])
    other = torch.zeros_like(expected)
    other[:, :2] = expected[:, :2].T
    rtol = 4e-3 if dtype == torch.bfloat16 else 0
    for _ in range(2):  # two backwards of one graph
        grads = torch.autograd.grad(logprobs, [hidden, weight], upstream, retain_graph=True)
        for grad, true in zip(grads, (expected, other), strict=True):
            torch.testing.assert_close(grad.double(), true, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_w3_exactly_the_demanded_gradients(needs: tuple[bool, ...], mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (7, 3), (7,))
    tensors = [
        torch.randn(shape, generator=generator).requires_grad_(need)
        for shape, need in zip(shapes, needs, strict=True)
    ]
    labels = torch.tensor([0, 6, -100, 2])
    modes = {
        "grad": torch.enable_grad(),
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
    }
    with modes[mode]:
        logprobs = linear_logprobs(tensors[0], tensors[1], labels, bias=tensors[2]).logprobs
    dense = (tensors[0] @ tensors[1].T + tensors[2]).log_softmax(1)
    expected = dense[torch.arange(4), labels.clamp(min=0)] * (labels >= 0)
    torch.testing.assert_close(logprobs, expected)
    if mode != "grad" or not any(needs):
        assert not logprobs.requires_grad
        return
    logprobs.sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == list(needs)


@pytest.mark.parametrize(
    ("dtype", "depth", "vocab_size"), [(torch.float32, 7, 9), (torch.bfloat16, 64, 300)]
)
def test_l1_strided_inputs_equal_contiguous_ones(
    dtype: torch.dtype, depth: int, vocab_size: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    base, scale = normal(5, 3, depth), 2.4 / depth**0.5
    hiddens = [
        base.transpose(0, 1).flatten(0, 1),
        base.flatten(0, 1).T.contiguous().T,
        base[0, :1].expand(15, depth),
        normal(15, depth + 1)[:, 1:],
        normal(30, depth)[::2],
    ]
    weights = [
        normal(vocab_size, depth, scale=scale),
        normal(depth, vocab_size, scale=scale).T,
        normal(vocab_size, depth + 8, scale=scale)[:, 4:-4],
    ]
    labels = torch.randint(vocab_size, (15,), generator=generator).to(device)
    every_other = torch.stack([labels, labels.flip(0)], 1).flatten()[::2]
    rtol, atol = (8e-3, 2e-3) if dtype == torch.bfloat16 else (0.0, 1e-6)
    if device.type == "cuda" and dtype == torch.float32:
        atol = 1e-5  # other strides, another matrix product
    for strided in itertools.product(hiddens, weights, [labels, every_other]):
        results = []
        for hidden, weight, target in (strided, tuple(t.contiguous() for t in strided)):
            inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
            logprobs = linear_logprobs(inputs[0], inputs[1], target, entropy=True).logprobs
            results.append((logprobs, *torch.autograd.grad(logprobs.sum(), inputs)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
