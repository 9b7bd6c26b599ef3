"""The head's ops through the products with epilogues, in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastrl import kernels
from fastrl.functional.head.tile_ops import chunk_itemsize
from fastrl.kernels import linear
from tests.helpers.fused_head import SMALL_BLOCKS, assert_close_to_float64, logprobs_and_gradients
from tests.helpers.head_cases import CASES, HeadCase

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs kernels on the GPU"),
]
NAMES = ("plain", "one_label", "padding", "temperature_per_token", "softcap", "everything")
# Logits of a few nats: e^(reference - lse) h is rounded to fp16 here, as it never is on a GPU.
FUSED = [replace(case, hidden_size=16, spread=0.3) for case in CASES if case.name in NAMES]


@pytest.fixture(autouse=True)
def _small_tiles_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "run_on_cpu", True)
    monkeypatch.setattr(linear, "BLOCKS", SMALL_BLOCKS)


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("strategy", ["recompute", "one_chunk", "two_chunks"])
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_equals_float64(case: HeadCase, strategy: str, entropy: bool) -> None:
    tensors = case.tensors(torch.float16)
    assert chunk_itemsize(tensors.hidden_states, tensors.weight) == 2
    assert_close_to_float64(
        logprobs_and_gradients(tensors, strategy, entropy),
        logprobs_and_gradients(tensors.in_float64(), strategy, entropy),
    )


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
            logprobs_and_gradients(strided, strategy, False),
            logprobs_and_gradients(plain, strategy, False),
            strict=True,
        ):
            assert torch.equal(actual, expected)


def test_ranks_agree_on_chunks_also_without_a_row_of_the_vocabulary() -> None:
    hidden = torch.zeros(4, 16, dtype=torch.float16)
    weight = torch.zeros(5, 16, dtype=torch.float16)
    assert chunk_itemsize(hidden, weight[:0]) == chunk_itemsize(hidden, weight)
