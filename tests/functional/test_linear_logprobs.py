"""The recompute strategy against the definition, for every case and bound on the logits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastrl import linear_logprobs
from fastrl.functional.head import recompute
from fastrl.functional.head.call import HeadCall
from fastrl.functional.reference import head as reference
from tests.helpers.head_cases import CASES, HeadCase, HeadTensors

BOUNDS = [
    pytest.param(None, 2**30, id="one_tile"),
    pytest.param(1, 2**30, id="rows_of_one"),
    pytest.param(4, 2**30, id="rows_of_four"),
    pytest.param(None, 512, id="narrow_tiles"),
]


def weighted(vectors: list[Tensor], upstream: list[Tensor]) -> Tensor:
    return torch.stack([(v * u).sum() for v, u in zip(vectors, upstream, strict=True)]).sum()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("chunk_size", "max_logits_bytes"), BOUNDS)
def test_equals_the_reference(
    case: HeadCase, chunk_size: int | None, max_logits_bytes: int
) -> None:
    tensors = case.tensors()
    statistics = linear_logprobs(
        tensors.hidden_states,
        tensors.weight,
        tensors.labels,
        entropy=True,
        chunk_size=chunk_size,
        max_logits_bytes=max_logits_bytes,
        **tensors.options,  # type: ignore[arg-type]
    )
    expected = tensors.reference()
    for name in ("logprobs", "entropy", "logsumexp"):
        torch.testing.assert_close(
            getattr(statistics, name), getattr(expected, name), atol=1e-10, rtol=1e-12
        )
    upstream = tensors.upstream()
    actual_grads = torch.autograd.grad(weighted(statistics.vectors(), upstream), tensors.inputs)
    expected_grads = torch.autograd.grad(
        weighted(expected.vectors(), upstream), tensors.inputs, materialize_grads=True
    )
    for actual, wanted in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-10)
    if case.padding:
        assert actual_grads[1][case.vocab_size :].count_nonzero() == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_is_argmax_needs_no_other_pass(case: HeadCase, dtype: torch.dtype) -> None:
    tensors = case.tensors(dtype)
    wide = tensors.in_float64()
    z = reference.logits(wide.hidden_states, wide.weight, **wide.options)  # type: ignore[arg-type]
    # Every second label is the largest logit's.
    labels = torch.where(torch.arange(len(z)) % 2 == 0, z.argmax(1), tensors.labels)
    labels = torch.where(tensors.labels == -100, -100, labels)
    options = {"entropy": True, "max_logits_bytes": 512, **tensors.options}
    arguments = (tensors.hidden_states, tensors.weight, labels)
    with_it = linear_logprobs(*arguments, statistics=["is_argmax"], **options)  # type: ignore[arg-type]
    assert with_it.is_argmax is not None
    assert torch.equal(with_it.is_argmax, z.argmax(1) == labels)
    assert linear_logprobs(*arguments, **options).is_argmax is None  # type: ignore[arg-type]
    grads = torch.autograd.grad(with_it.logprobs.sum(), tensors.inputs)
    without = linear_logprobs(*arguments, **options).logprobs.sum()  # type: ignore[arg-type]
    for grad, wanted in zip(grads, torch.autograd.grad(without, tensors.inputs), strict=True):
        assert torch.equal(grad, wanted)


def test_no_token() -> None:
    hidden = torch.zeros(0, 5, requires_grad=True)
    weight = torch.randn(7, 5, requires_grad=True)
    statistics = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), entropy=True)
    assert [vector.shape for vector in statistics.vectors()] == [(0,)] * 3
    statistics.logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 5)
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES[:3] + CASES[-4:], ids=lambda case: case.name)
def test_low_precision_is_as_accurate_as_fp32_logits(case: HeadCase, dtype: torch.dtype) -> None:
    tensors = case.tensors(dtype)
    statistics = linear_logprobs(
        tensors.hidden_states,
        tensors.weight,
        tensors.labels,
        entropy=True,
        max_logits_bytes=600,
        **tensors.options,  # type: ignore[arg-type]
    )
    exact = case.tensors(dtype)
    truth = exact_reference(exact)
    for actual, wanted in zip(statistics.vectors(), truth, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), wanted, atol=2e-6, rtol=2e-6)
    weighted(statistics.vectors(), tensors.upstream()).backward()
    for tensor in tensors.inputs:
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype


def exact_reference(tensors: HeadTensors) -> list[Tensor]:
    """The statistics in float64 of the inputs as rounded to their dtype."""
    bias = None if tensors.bias is None else tensors.bias.double()
    wide = replace(
        tensors,
        hidden_states=tensors.hidden_states.double(),
        weight=tensors.weight.double(),
        bias=bias,
    )
    return wide.reference().vectors()


def test_rows_outside_of_gradient_rows_get_no_gradient() -> None:
    tensors = HeadCase("plain", unlabelled=()).tensors()
    kept = torch.tensor([1, 4, 6])
    statistics = linear_logprobs(
        tensors.hidden_states, tensors.weight, tensors.labels, gradient_rows=kept
    )
    (grad,) = torch.autograd.grad(statistics.logprobs.sum(), [tensors.hidden_states])
    assert grad.abs().sum(1).nonzero()[:, 0].tolist() == kept.tolist()
    torch.testing.assert_close(statistics.logprobs, tensors.reference().logprobs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.zeros(4, dtype=torch.int32)}, r"`labels` must be int64 of shape \[4\]"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"`labels` must be int64 of shape \[4\]"),
        ({"labels": torch.full((4,), 6)}, r"in \[0, 6\), got 6"),
        ({"labels": torch.full((4,), -1)}, r"in \[0, 6\), got -1"),
        ({"labels": torch.full((4,), 5), "vocab_size": 5}, r"in \[0, 5\), got 5"),
        ({"vocab_size": 7}, "`vocab_size` must be between 1 and the 6 rows"),
        ({"hidden_states": torch.zeros(2, 2, 3)}, r"`labels` must be of the shape .* \[2, 2\]"),
        ({"hidden_states": torch.zeros(4)}, r"`hidden_states` must be .* \[T, D\]"),
        ({"weight": torch.zeros(6, 3, dtype=torch.float64)}, "`weight` must be torch.float32"),
        ({"weight": torch.zeros(0)}, "ZeRO-3"),
        ({"bias": torch.zeros(5)}, r"`bias` must be torch.float32 of shape \[6\]"),
        ({"temperature": 0.0}, "`temperature` must be positive, got 0.0"),
        (
            {"temperature": torch.ones(4, requires_grad=True)},
            "`temperature` must not require a gradient",
        ),
        ({"temperature": torch.ones(3)}, r"`temperature` must be .* \[4\]"),
        ({"rows": torch.tensor([0, 2, 1, 3])}, "`rows` must be in rising order, got 2 before 1"),
        ({"softcap": -1.0}, "`softcap` must be positive"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1"),
        ({"max_logits_bytes": 0}, "`max_logits_bytes` must be positive"),
        ({"weight_rows": 8}, r"`weight` must have 8 rows.* got 6; "),
        ({"statistics": "is_argmax"}, r"`statistics` must be .* got 'is_argmax'; give \['is_arg"),
        ({"statistics": ["top"]}, r"`statistics` must be .* \['top'\]"),
        ({"logit_scale": math.nan}, "`logit_scale` must be a finite number, got nan"),
        ({"logit_scale": torch.ones(())}, "`logit_scale` must be a finite number, got a Tensor"),
    ],
)
def test_errors_name_what_does_not_fit(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "hidden_states": torch.zeros(4, 3),
        "weight": torch.zeros(6, 3),
        "labels": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["hidden_states", "weight", "labels"])
def test_what_is_missing_is_named(name: str) -> None:
    arguments: dict[str, object] = {
        "hidden_states": torch.zeros(4, 3),
        "weight": torch.zeros(6, 3),
        "labels": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(TypeError, match=f"`{name}` must be a tensor, got None"):
        linear_logprobs(**(arguments | {name: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("entropy", [False, True])
def test_rows_whose_gradient_is_zero_are_dropped_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, entropy: bool
) -> None:
    tensors = HeadCase("plain", unlabelled=(2,)).tensors()
    counts: list[int] = []
    whole = recompute.recompute_backward

    def counted(call: HeadCall, rows: Tensor, *arguments: object) -> object:
        counts.append(len(rows))
        return whole(call, rows, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recompute, "recompute_backward", counted)
    upstream = [draw.clone() for draw in tensors.upstream()]
    for draw in upstream:
        draw[[0, 5, 6]] = 0.0
    upstream[2][5] = 1e-30
    results = []
    for drop in (False, True):
        statistics = linear_logprobs(
            tensors.hidden_states, tensors.weight, tensors.labels, entropy=entropy,
            drop_inactive_rows=drop, chunk_size=4,
        )  # fmt: skip
        vectors = statistics.vectors()
        loss = weighted(vectors, upstream if entropy else [upstream[0], upstream[2]])
        results.append(torch.autograd.grad(loss, tensors.inputs))
    assert counts == [12, 10]
    for every, dropped in zip(*results, strict=True):
        torch.testing.assert_close(every, dropped, atol=1e-13, rtol=1e-13)


def test_autocast_does_not_round_the_logits() -> None:
    tensors = HeadCase("plain", hidden_size=64).tensors(torch.float32)

    def run() -> list[Tensor]:
        statistics = linear_logprobs(tensors.hidden_states, tensors.weight, tensors.labels)
        return [
            statistics.logprobs,
            *torch.autograd.grad(statistics.logprobs.square().sum(), tensors.inputs),
        ]

    exact = run()
    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
    for actual, expected in zip(cast, exact, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_a_second_derivative_is_refused() -> None:
    """The gradient has no graph: a penalty on it would be left out in silence."""
    tensors = HeadCase("plain").tensors()
    statistics = linear_logprobs(tensors.hidden_states, tensors.weight, tensors.labels)
    with pytest.raises(RuntimeError, match="must not be differentiated again"):
        torch.autograd.grad(statistics.logprobs.sum(), tensors.inputs, create_graph=True)
