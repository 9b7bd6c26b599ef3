"""The head's ops through the products with epilogues, in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastrl import kernels
from fastrl.functional.head.call import CallOptions
from fastrl.functional.head.checks import check_inputs
from fastrl.functional.head.recompute import recompute_logprobs
from fastrl.functional.head.single_pass import single_pass
from fastrl.functional.head.tile_ops import chunk_itemsize
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels import linear
from fastrl.kernels.arguments import LogitTransform
from fastrl.parallel import ParallelGroups
from tests.helpers.head_cases import CASES, HeadCase, HeadTensors

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs kernels on the GPU"),
]
NAMES = ("plain", "one_label", "padding", "temperature_per_token", "softcap", "everything")
SMALL = linear.Blocks(rows=16, columns=32, depth=16)
# Logits of a few nats: e^(reference - lse) h is rounded to fp16 here, as it never is on a GPU.
FUSED = [replace(case, hidden_size=16, spread=0.3) for case in CASES if case.name in NAMES]


@pytest.fixture(autouse=True)
def _small_tiles_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "run_on_cpu", True)
    monkeypatch.setattr(linear, "BLOCKS", SMALL)


def value(statistics: TokenStatistics, weights: list[Tensor]) -> Tensor:
    vectors = statistics.vectors()
    return torch.stack([(v * w).sum() for v, w in zip(vectors, weights, strict=True)]).sum()


def run(
    tensors: HeadTensors,
    strategy: str,
    entropy: bool,
    groups: ParallelGroups | None = None,
    weight_rows: int | None = None,
) -> list[Tensor]:
    """Log-probabilities and gradients, with an upstream gradient that is not 1."""
    case = tensors.case
    call = check_inputs(
        tensors.hidden_states, tensors.weight, tensors.labels, bias=tensors.bias,
        transform=LogitTransform(tensors.temperature, case.softcap, case.logit_scale),
        vocab_size=case.vocab_size, weight_rows=weight_rows, groups=groups,
        rows=None, options=CallOptions(entropy, None, 2**20),
    )  # fmt: skip
    weights = tensors.upstream()
    weights = weights if entropy else [weights[0], weights[2]]
    if strategy == "recompute":
        statistics = recompute_logprobs(call)
        loss = value(statistics, weights)
    else:
        count = len(call.rows)
        ends = [count] if count < 2 or strategy == "one_chunk" else [count // 2, count]
        compact = [w[call.rows] for w in weights]
        loss, statistics = single_pass(
            call,
            lambda part, start, stop: value(part, [w[start:stop] for w in compact]),
            gradient_rows=call.rows, chunk_ends=ends,
        )  # fmt: skip
    return [statistics.logprobs, *torch.autograd.grad(-1.7 * loss, tensors.inputs)]


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("strategy", ["recompute", "one_chunk", "two_chunks"])
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_equals_float64(case: HeadCase, strategy: str, entropy: bool) -> None:
    tensors = case.tensors(torch.float16)
    assert chunk_itemsize(tensors.hidden_states, tensors.weight) == 2
    assert_close(run(tensors, strategy, entropy), run(in_float64(tensors), strategy, entropy))


def in_float64(tensors: HeadTensors) -> HeadTensors:
    """The same numbers, wider."""
    return replace(
        tensors,
        hidden_states=tensors.hidden_states.detach().double().requires_grad_(),
        weight=tensors.weight.detach().double().requires_grad_(),
        bias=None if tensors.bias is None else tensors.bias.detach().double().requires_grad_(),
    )


def assert_close(results: list[Tensor], truths: list[Tensor]) -> None:
    """Log-probabilities as of fp32 logits, gradients as of operands that were rounded."""
    (logprobs, *grads), (expected, *true_grads) = results, truths
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=2e-5)
    for grad, true in zip(grads, true_grads, strict=True):
        assert grad.dtype == torch.float16
        assert (grad.double() - true).norm() < 1.2e-2 * true.norm()


@pytest.mark.parametrize("strategy", ["recompute", "one_chunk"])
def test_a_bias_of_any_strides(strategy: str) -> None:
    tensors = replace(FUSED[0], bias=True, unlabelled=()).tensors(torch.float16)
    assert tensors.bias is not None
    wide = torch.full((len(tensors.bias), 3), 9.0, dtype=torch.float16)
    wide[:, 0] = tensors.bias.detach()
    one = torch.tensor([0.5], dtype=torch.float16)
    for bias in (wide[:, 0], one.expand(len(tensors.bias))):
        plain = replace(tensors, bias=bias.clone().contiguous().requires_grad_())
        strided = replace(tensors, bias=bias.requires_grad_())
        for actual, expected in zip(
            run(strided, strategy, False), run(plain, strategy, False), strict=True
        ):
            assert torch.equal(actual, expected)


def test_ranks_agree_on_chunks_also_without_a_row_of_the_vocabulary() -> None:
    hidden = torch.zeros(4, 16, dtype=torch.float16)
    weight = torch.zeros(5, 16, dtype=torch.float16)
    assert chunk_itemsize(hidden, weight[:0]) == chunk_itemsize(hidden, weight)
