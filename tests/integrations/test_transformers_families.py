"""The head in each family gives what the model's own logits of each document alone give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.integrations.transformers import attach_head, packing_of
from tests.helpers.hf_models import (
    CAUSAL,
    NOT_CAUSAL,
    VISION_LANGUAGE,
    VOCAB_SIZE,
    layout,
    tiny_model,
)
from tests.helpers.own_logits import Float64, gradients, own_logprobs, own_loss, some_batch

ROOT = Path(__file__).parent.parent.parent
FAMILIES = [*CAUSAL, *VISION_LANGUAGE]
# Their packed documents attend to each other or share a state.
LEAKING = {
    *("gpt_oss", "opt", "bloom", "minimax", "jamba", "falcon_h1", "qwen3_next"),
    *("recurrent_gemma", "nemotron_h"),
}
LOSSES: dict[str, Any] = {"policy": {"type": "gspo", "epsilon_low": 0.3, "epsilon_high": 0.4}}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with Float64():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_what_its_own_logits_give(family: str) -> None:
    model = tiny_model(family)
    batch = some_batch(VOCAB_SIZE)
    expected = own_logprobs(model, batch)
    head = attach_head(model, LOSSES)
    expected_loss = own_loss(head, expected, batch)
    (1.7 * expected_loss).backward()
    expected_gradients = gradients(model)

    output = model(batch=batch, return_logprobs=True)
    (1.7 * output.loss).backward()
    atol = 1e-9
    torch.testing.assert_close(output.logprobs, expected.detach(), rtol=0, atol=atol)
    torch.testing.assert_close(output.loss, expected_loss, rtol=0, atol=atol)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=atol, msg=name)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected_gradients.values())


def test_there_are_forty_families() -> None:
    assert len(FAMILIES) >= 40
    assert set(FAMILIES) >= LEAKING


def test_the_docs_have_the_layout_of_each_family() -> None:
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (packed|padded|refused) \((\d+)\) \| (.*) \|$", text, re.MULTILINE)
    found = {name.strip("`"): row[0] for row in rows for name in row[2].split(", ")}
    assert sum(int(row[1]) for row in rows) == len(found)
    assert found == {family: layout(family) for family in [*FAMILIES, *NOT_CAUSAL]}


@pytest.mark.parametrize("family", sorted(LEAKING | {"llama", "mixtral"}))
def test_the_layout_is_found_in_bf16_too(family: str) -> None:
    model = tiny_model(family).bfloat16()
    attach_head(model, {})
    assert packing_of(model) == ("padded" if family in LEAKING else "packed")


@pytest.mark.parametrize("family", sorted(LEAKING))
def test_a_family_that_mixes_packed_documents_is_padded(family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(ValueError, match=r"must keep the documents of a batch apart.*'packed'"):
        attach_head(model, LOSSES, packing="packed")
    attach_head(model, LOSSES)
    assert packing_of(model) == "padded"


def test_padding_may_be_asked_for() -> None:
    model = tiny_model("llama")
    batch = some_batch(VOCAB_SIZE)
    attach_head(model, {}, packing="padded")
    assert packing_of(model) == "padded"
    with torch.no_grad():
        found = model(batch=batch).logprobs
    torch.testing.assert_close(found, own_logprobs(model, batch).detach(), rtol=0, atol=1e-12)
