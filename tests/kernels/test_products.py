"""The head's ops through the kernels, against the definition and against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastrl import kernels, linear_logprobs
from fastrl.functional.head.tile_ops import chunk_itemsize
from fastrl.kernels import linear
from tests.helpers.fused_head import SMALL_BLOCKS, assert_close_to_float64, logprobs_and_gradients
from tests.helpers.head_cases import CASES, HeadCase
from tests.helpers.tile_cases import INTERPRETED, OPERAND_DTYPE, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAMES = ("plain", "one_label", "padding", "temperature_per_token", "softcap", "everything")
# Logits of a few nats: e^(reference - lse) h is rounded to fp16 in the interpreter, as it never is
# on a GPU.
FUSED = [replace(case, hidden_size=16, spread=0.3) for case in CASES if case.name in NAMES]
GRADIENT_ERRORS = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 6e-3,
}
# The interpreter cuts bf16 off, and wider dtypes have no products with epilogues.
DTYPES = [
    dtype if dtype == torch.float16 else pytest.param(dtype, marks=pytest.mark.gpu)
    for dtype in GRADIENT_ERRORS
]


@pytest.fixture(autouse=True)
def _small_tiles_on_cpu(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(kernels, "run_on_cpu", True)
        monkeypatch.setattr(linear, "BLOCKS", SMALL_BLOCKS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", [5, 64], ids=["rows", "fused"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(
    case: HeadCase, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    tensors = replace(case, hidden_size=hidden_size).tensors(dtype, device)
    wide = tensors.in_float64()
    statistics = linear_logprobs(
        tensors.hidden_states,
        tensors.weight,
        tensors.labels,
        entropy=True,
        **tensors.options,  # type: ignore[arg-type]
    )
    expected = wide.reference()
    size = (1e-12 if dtype == torch.float64 else 4e-6 * hidden_size**0.5) * case.spread
    for result, true in zip(statistics.vectors(), expected.vectors(), strict=True):
        atol = 2e-5 * case.spread if INTERPRETED else 10 * size
        torch.testing.assert_close(result.double(), true, rtol=1e-5, atol=atol)
    upstream = tensors.upstream()

    def total(vectors: list[Tensor]) -> Tensor:
        return torch.stack([(v * u).sum() for v, u in zip(vectors, upstream, strict=True)]).sum()

    grads = torch.autograd.grad(total(statistics.vectors()), tensors.inputs)
    true_grads = torch.autograd.grad(total(expected.vectors()), wide.inputs, materialize_grads=True)
    for grad, true in zip(grads, true_grads, strict=True):
        assert grad.dtype == dtype
        assert relative_error(grad, true) < GRADIENT_ERRORS[dtype] + 10 * size


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize(
    ("strategy", "entropy"),
    # With an entropy, `recompute` is held to the definition above.
    [("recompute", False), *itertools.product(["one_chunk", "two_chunks"], [False, True])],
)
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_equals_float64(case: HeadCase, strategy: str, entropy: bool, device: torch.device) -> None:
    tensors = case.tensors(OPERAND_DTYPE, device)
    assert chunk_itemsize(tensors.hidden_states, tensors.weight) == 2
    assert_close_to_float64(
        logprobs_and_gradients(tensors, strategy, entropy),
        logprobs_and_gradients(tensors.in_float64(), strategy, entropy),
    )


@pytest.mark.parametrize("strategy", ["recompute", "one_chunk"])
def test_a_bias_of_any_strides(strategy: str, device: torch.device) -> None:
    tensors = replace(FUSED[0], bias=True, unlabelled=()).tensors(OPERAND_DTYPE, device)
    assert tensors.bias is not None
    wide = torch.full((len(tensors.bias), 3), 9.0, dtype=OPERAND_DTYPE)
    wide[:, 0] = tensors.bias.detach()
    one = torch.tensor([0.5], dtype=OPERAND_DTYPE)
    for bias in (wide[:, 0], one.expand(len(tensors.bias))):
        plain = replace(tensors, bias=bias.clone().contiguous().requires_grad_())
        strided = replace(tensors, bias=bias.requires_grad_())
        for actual, expected in zip(
            logprobs_and_gradients(strided, strategy, False),
            logprobs_and_gradients(plain, strategy, False),
            strict=True,
        ):
            assert torch.equal(actual, expected)


def test_ranks_agree_on_chunks_also_without_a_row_of_the_vocabulary() -> None:
    hidden = torch.zeros(4, 16, dtype=OPERAND_DTYPE)
    weight = torch.zeros(5, 16, dtype=OPERAND_DTYPE)
    assert chunk_itemsize(hidden, weight[:0]) == chunk_itemsize(hidden, weight)
