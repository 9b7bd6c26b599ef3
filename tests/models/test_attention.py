"""The block mask of FlexAttention and the grouping of documents, pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastrl.models.attention import (
    FlexDocumentAttention,
    PerDocumentAttention,
    document_attention,
    document_block_mask,
)
from tests.helpers.block_masks import assert_block_mask
from tests.helpers.model_cases import COMPILES


def document_index(lengths: list[int], padding: int) -> Tensor:
    lengths_and_padding = torch.tensor([*lengths, padding])
    return torch.tensor([*range(len(lengths)), -1]).repeat_interleave(lengths_and_padding)


def visible_pairs(index: Tensor) -> Tensor:
    """[T, T], by the definition."""
    row = torch.arange(len(index))
    same = (index[:, None] == index) & (index >= 0) & (row <= row[:, None])
    return same | (row == row[:, None])


CASES = {
    "one_document": ([400], 0),
    "one_token": ([1], 0),
    "ragged": ([5, 1, 130, 300, 128, 1, 1, 7], 0),
    "padded": ([128, 256, 3], 200),
    "on_the_blocks": ([128, 256], 128),
    "padding_only": ([], 150),
}


@pytest.mark.parametrize("name", CASES)
def test_block_mask_is_the_definition(name: str) -> None:
    index = document_index(*CASES[name])
    assert_block_mask(document_block_mask(index), visible_pairs(index))


@pytest.mark.parametrize("name", CASES)
def test_per_document_attention_is_the_definition(name: str) -> None:
    index = document_index(*CASES[name])
    query, key, value = random_heads(len(index), torch.float64, torch.device("cpu"))
    attend = document_attention(index, implementation="auto", head_dim=16, dtype=torch.float64)
    assert isinstance(attend, PerDocumentAttention)
    got = attend.of_layer(0)(query, key, value)
    expected = definition(query, key, value, index)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(got)
    inputs = (query, key, value)
    for gradient, reference in zip(
        torch.autograd.grad(got, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)


def random_heads(
    num_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    def heads(number: int) -> Tensor:
        values = torch.randn(num_tokens, number, 16, device=device, dtype=dtype)
        return values.requires_grad_()

    return heads(4), heads(2), heads(2)


def definition(query: Tensor, key: Tensor, value: Tensor, index: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / 4
    scores = scores.masked_fill(~visible_pairs(index.cpu()).to(index.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def test_documents_of_like_length_are_batched() -> None:
    lengths = [33, 64, 1, 1, 5, 40, 16, 900, 2]
    attend = document_attention(
        document_index(lengths, 3), implementation="per_document", head_dim=16, dtype=torch.float32
    )
    assert isinstance(attend, PerDocumentAttention)
    shapes = [tuple(rows.shape) for rows in attend.groups.rows]
    assert shapes == [(5, 1), (3, 16), (3, 64), (1, 900)]


@pytest.mark.gpu
@COMPILES
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_is_the_definition(name: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    index = document_index(*CASES[name]).to(device)
    heads = random_heads(len(index), dtype, device)
    attend = document_attention(index, implementation="auto", head_dim=16, dtype=dtype)
    assert isinstance(attend, FlexDocumentAttention)
    got = attend.of_layer(0)(*heads)
    query, key, value = (tensor.double() for tensor in heads)
    expected = definition(query, key, value, index)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
    upstream = torch.randn_like(got)
    for gradient, reference in zip(
        torch.autograd.grad(got, heads, upstream),
        torch.autograd.grad(expected, heads, upstream.double()),
        strict=True,
    ):
        error = (gradient.double() - reference.double()).norm()
        # A token that sees itself alone has no gradient of its query; then the upstream scales.
        assert error <= tolerance * (reference.double().norm() + upstream.double().norm())
