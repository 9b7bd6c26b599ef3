"""The documents on losses: complete, and their code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fastrl import LanguageModelHead
from fastrl.config import GRPOLossConfig
from fastrl.config.losses import BuiltInLossConfig
from fastrl.functional.reference import losses as reference_losses
from tests.helpers.loss_cases import (
    CASES,
    pack,
    policy_documents,
    random_statistics,
    reference_tokens,
)
from tests.helpers.loss_heads import capped_head, random_hidden

DOCS = Path(__file__).parents[3] / "docs"
BUILT_IN = get_args(get_args(BuiltInLossConfig)[0])
TYPES = [config.model_fields["type"].default for config in BUILT_IN]


def test_every_loss_has_a_row_a_definition_and_a_case() -> None:
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    table = text.split("## The losses")[1].split("###")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(TYPES)
    assert sorted(reference_losses.LOSSES) == sorted(TYPES)
    assert sorted({case.config["type"] for case in CASES}) == sorted(TYPES)


@pytest.mark.parametrize("preset", GRPOLossConfig.PRESETS)
def test_presets_are_as_documented(preset: str) -> None:
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{preset}`"))
    shown = dict(re.findall(r"`(\w+): ([\w.]+)`", row))
    values = {name: str(value) for name, value in GRPOLossConfig.PRESETS[preset].items()}
    assert shown == values


def test_adding_a_loss_works_as_documented() -> None:
    page = (DOCS / "adding_a_loss.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "adding_a_loss"}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/adding_a_loss.md", "exec", dont_inherit=True), scope)
    batch = pack(policy_documents())
    statistics = random_statistics(batch)
    scope["check"](batch, statistics, reference_tokens(statistics, batch))
    # Under the head, without a change to the package.
    head: LanguageModelHead = capped_head({"policy": {"type": "grpo"}})
    head.losses["policy"] = scope["AsymmetricLoss"](scope["AsymmetricLossConfig"]())
    output = head(random_hidden(batch), batch)
    assert output.loss is not None
    grad = torch.autograd.grad(output.loss, [head.weight])[0]
    assert grad.isfinite().all()
    assert grad.count_nonzero()
