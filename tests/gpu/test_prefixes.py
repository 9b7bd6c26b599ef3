"""Shared prefixes under FlexAttention are those of the per-document path and of flat packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import HeadOutput, Llama, TokenBatch
from fastrl.models.attention import FlexDocumentAttention
from fastrl.models.compiled import compile_layers
from fastrl.models.prefix_attention import path_groups, prefix_attention
from tests.helpers.model_cases import tiny_config
from tests.helpers.shared_prefixes import LOSSES, grouped_documents, tree_of_paths, wide_batch

# torch warns of itself when it compiles.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_flex_attention_is_the_definition(seed: int, dtype: torch.dtype) -> None:
    until = wide_batch(seed, num_padding=200 * seed).visible_until
    assert until is not None
    heads = [
        torch.randn(len(until), number, 16, device="cuda", dtype=dtype, requires_grad=True)
        for number in (4, 2, 2)
    ]
    attention = prefix_attention(until.cuda(), implementation="auto", head_dim=16, dtype=dtype)
    assert isinstance(attention, FlexDocumentAttention)
    got = attention(*heads)
    query, key, value = (tensor.double() for tensor in heads)
    expected = _definition(query, key, value, until)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
    upstream = torch.randn_like(got)
    gradients = torch.autograd.grad(got, heads, upstream)
    references = torch.autograd.grad(expected, heads, upstream.double())
    for gradient, reference in zip(gradients, references, strict=True):
        error = (gradient.double() - reference.double()).norm()
        assert error <= tolerance * (reference.double().norm() + upstream.double().norm())


def _definition(query: Tensor, key: Tensor, value: Tensor, until: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / 4
    scores = scores.masked_fill(~tree_of_paths(until).cuda(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def test_no_wait_for_the_device() -> None:
    until = wide_batch(0).visible_until
    assert until is not None
    on_device = until.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefix_attention(on_device, implementation="flex", head_dim=16, dtype=torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert path_groups(on_device).slots.is_cuda


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("implementation", ["flex", "per_document"])
def test_a_step_is_that_of_the_flat_sequence(implementation: str, compiled: bool) -> None:
    """Loss and gradients in fp32, shared and flat in turn on one model."""
    options: dict[str, Any] = {"attention_implementation": implementation, "head_dim": 16}
    torch.manual_seed(3)
    config = tiny_config(head={"losses": {"loss": LOSSES["grpo"]}}, **options)
    llama = Llama(config, device="cuda", dtype=torch.float32)
    if compiled:
        compile_layers(llama.model.layers)
    results = []
    for share in (False, True, False, True):
        batch = TokenBatch.from_documents(grouped_documents(), share_prefixes=share)
        (kwargs,) = batch.to_kwargs(device="cuda")
        output: HeadOutput = llama(kwargs)
        assert output.loss is not None
        output.loss.backward()
        grads = [parameter.grad.clone() for parameter in llama.parameters()]  # type: ignore[union-attr]
        llama.zero_grad()
        results.append((output.loss.detach(), grads))
    expected_loss, expected_grads = results[0]
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-5)
        for grad, expected in zip(grads, expected_grads, strict=True):
            assert (grad - expected).norm() <= 1e-4 * expected.norm() + 1e-6
