"""FlashAttention over documents of any lengths: equal to the definition, finite at padding."""

from __future__ import annotations

import pytest
import torch

from fastrl.config.model import AttentionImplementation
from fastrl.models import flash4
from fastrl.models.attend import DocumentLengths
from fastrl.models.attention import document_attention
from tests.helpers.tile_cases import relative_error

# flash-attn-4 warns of itself when it compiles.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

LENGTHS = (1, 130, 17, 300, 64)


@pytest.mark.parametrize("implementation", ["varlen", "flash4"])
@pytest.mark.parametrize("padding", [0, 5, 700])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_varlen_is_the_definition(
    implementation: AttentionImplementation, padding: int, known: bool, heads: tuple[int, int]
) -> None:
    if implementation == "flash4" and (lacks := flash4.refusal(torch.device("cuda"))):
        pytest.skip(lacks)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    index = torch.cat([index, torch.full((padding,), -1)]).cuda()
    lengths = DocumentLengths(len(LENGTHS), max(LENGTHS)) if known else None
    number, shared = heads
    states = [
        torch.randn(len(index), count, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for count in (number, shared, shared)
    ]
    upstream = torch.randn(len(index), number, 64, device="cuda", dtype=torch.bfloat16)
    is_token = (index >= 0)[:, None, None]
    results = []
    kinds: tuple[AttentionImplementation, ...] = (implementation, "per_document")
    for kind in kinds:
        attend = document_attention(
            index,
            implementation=kind,
            head_dim=64,
            dtype=torch.bfloat16,
            lengths=lengths,
        ).of_layer(0)
        output = attend(*states)
        assert torch.isfinite(output).all()
        results.append([output, *torch.autograd.grad((output * upstream * is_token).sum(), states)])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found * is_token, expected * is_token) < 1e-2
