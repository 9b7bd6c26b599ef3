"""Shared prefixes under the kernels of a GPU are those of the definition and of flat packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import HeadOutput, Llama, TokenBatch
from fastrl.config.model import AttentionImplementation
from fastrl.models import flash4
from fastrl.models.attend import Attend, DocumentLengths
from fastrl.models.attention import FlexDocumentAttention
from fastrl.models.compiled import compile_layers
from fastrl.models.prefix_attention import path_groups, prefix_attention
from fastrl.models.tree_attention import TreeAttention
from tests.helpers.model_cases import tiny_config
from tests.helpers.shared_prefixes import (
    LOSSES,
    attention_over_paths,
    grouped_documents,
    visible_until_of,
    wide_batch,
)

# torch warns of itself when it compiles.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_flex_attention_is_the_definition(seed: int, dtype: torch.dtype) -> None:
    until = wide_batch(seed, num_padding=200 * seed).visible_until
    assert until is not None
    attention = prefix_attention(until.cuda(), implementation="auto", head_dim=16, dtype=dtype)
    assert isinstance(attention, FlexDocumentAttention)
    check_against_definition(attention, until, dtype, head_dim=16)


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
@pytest.mark.parametrize("name", ["small", "wide_0", "wide_1", "wide_2", "full_blocks"])
@pytest.mark.parametrize("implementation", ["varlen", "flash4"])
def test_trees_of_calls_are_the_definition(
    implementation: AttentionImplementation, name: str, heads: tuple[int, int]
) -> None:
    if implementation == "flash4" and (lacks := flash4.refusal(torch.device("cuda"))):
        pytest.skip(lacks)
    until, dtype = visible_until_of(name), torch.bfloat16
    attention = prefix_attention(
        until.cuda(), implementation=implementation, head_dim=64, dtype=dtype
    )
    assert isinstance(attention, TreeAttention)
    check_against_definition(attention, until, dtype, head_dim=64, heads=heads)


def check_against_definition(
    attention: Attend,
    until: Tensor,
    dtype: torch.dtype,
    *,
    head_dim: int,
    heads: tuple[int, int] = (4, 2),
) -> None:
    """Values and gradients, within what the dtype rounds."""
    of_heads = [
        torch.randn(len(until), number, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for number in (heads[0], heads[1], heads[1])
    ]
    got = attention(*of_heads)
    query, key, value = (tensor.double() for tensor in of_heads)
    expected = attention_over_paths(query, key, value, until)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
    upstream = torch.randn_like(got)
    gradients = torch.autograd.grad(got, of_heads, upstream)
    references = torch.autograd.grad(expected, of_heads, upstream.double())
    for gradient, reference in zip(gradients, references, strict=True):
        error = (gradient.double() - reference.double()).norm()
        assert error <= tolerance * (reference.double().norm() + upstream.double().norm())


@pytest.mark.parametrize("implementation", ["flex", "varlen"])
def test_no_wait_for_the_device(implementation: AttentionImplementation) -> None:
    until = wide_batch(0).visible_until
    assert until is not None
    on_device = until.cuda()
    lengths = DocumentLengths(1, 1, until)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefix_attention(
            on_device,
            implementation=implementation,
            head_dim=16,
            dtype=torch.bfloat16,
            lengths=lengths,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert path_groups(on_device).slots.is_cuda


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        ("flex", torch.float32, 1e-4),
        ("per_document", torch.float32, 1e-4),
        ("varlen", torch.bfloat16, 5e-2),
        ("flash4", torch.bfloat16, 5e-2),
    ],
)
def test_a_step_is_that_of_the_flat_sequence(
    implementation: str, dtype: torch.dtype, tolerance: float, compiled: bool
) -> None:
    """Loss and gradients, shared and flat in turn on one model."""
    if implementation == "flash4" and (lacks := flash4.refusal(torch.device("cuda"))):
        pytest.skip(lacks)
    head_dim = 16 if dtype == torch.float32 else 64
    options: dict[str, Any] = {"attention_implementation": implementation, "head_dim": head_dim}
    torch.manual_seed(3)
    # In 16 bits one without a clip, whose bound a token may be on either side of.
    name = "grpo" if dtype == torch.float32 else "cross_entropy"
    config = tiny_config(head={"losses": {"loss": LOSSES[name]}}, **options)
    llama = Llama(config, device="cuda", dtype=dtype)
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
        torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance / 10)
        for grad, expected in zip(grads, expected_grads, strict=True):
            error = (grad.double() - expected.double()).norm()
            assert error <= tolerance * expected.double().norm() + tolerance / 100
