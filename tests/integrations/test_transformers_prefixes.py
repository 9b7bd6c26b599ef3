"""Shared prefixes in models of transformers: where FlexAttention runs, and refused elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastrl import Document, TokenBatch
from fastrl.integrations.transformers import attach_head
from tests.helpers.hf_models import tiny_model
from tests.helpers.shared_prefixes import grouped_documents

LOSSES: dict[str, Any] = {"policy": {"type": "grpo"}}


def _documents() -> list[Document]:
    return [each for each in grouped_documents() if each.temperature == 1.0]


def _flex(family: str, **values: Any) -> Any:
    model = tiny_model(family, head_dim=16, **values).float()
    model.set_attn_implementation("flex_attention")
    return model


# torch warns of FlexAttention that is not compiled, which takes a minute. On a CPU it has no
# backward.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_probabilities_are_those_without(family: str) -> None:
    model = _flex(family)
    found = []
    with torch.compiler.set_stance("force_eager"):
        attach_head(model, LOSSES, packing="packed")
    for share in (False, True):
        batch = TokenBatch.from_documents(_documents(), share_prefixes=share)
        batch = batch.padded(batch.padded_length + 5)
        (kwargs,) = batch.to_kwargs()
        assert (kwargs.visible_until is not None) == share
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logprobs = model(batch=kwargs).logprobs
        found.append(torch.cat(batch.split_by_document(logprobs)))
    assert found[0].abs().max() > 1
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_those_without() -> None:
    model = _flex("llama").cuda()
    attach_head(model, LOSSES, packing="packed")
    found = []
    for share in (False, True):
        batch = TokenBatch.from_documents(_documents(), share_prefixes=share)
        (kwargs,) = batch.to_kwargs(device="cuda")
        model(batch=kwargs).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for flat, shared in zip(*found, strict=True):
        assert (shared - flat).norm() <= 1e-4 * flat.norm() + 1e-6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"implementation": "sdpa"}, r"runs 'sdpa'; call `model.set_attn_implementation\('flex"),
        ({"packing": "padded"}, "gets a row for each document"),
        ({"packing": "padded", "implementation": "sdpa"}, "gets a row for each document"),
        (
            {"family": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
            "has layers that see less",
        ),
        ({"family": "mistral", "sliding_window": 64}, r"has layers that see less \(\['sliding_w"),
    ],
    ids=str,
)
def test_a_model_that_cannot_share_is_told(options: dict[str, Any], expected: str) -> None:
    values = {**options}
    implementation = values.pop("implementation", "flex_attention")
    packing = values.pop("packing", "packed")
    model = tiny_model(values.pop("family", "llama"), **values)
    attach_head(model, LOSSES, packing=packing)
    model.set_attn_implementation(implementation)
    batch = TokenBatch.from_documents(_documents(), share_prefixes=True)
    (kwargs,) = batch.to_kwargs()
    with pytest.raises(ValueError, match=expected), torch.no_grad():
        model(batch=kwargs)
