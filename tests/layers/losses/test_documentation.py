"""The documents on losses: complete, and their code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fastrl import LanguageModelHead
from fastrl.config import GRPOLossConfig, PolicyGradientLossConfig
from fastrl.config.aliases import ALIASES, TYPE_ALIASES
from fastrl.config.losses import BuiltInLossConfig
from fastrl.functional.reference import losses as reference_losses
from tests.helpers.loss_cases import CASES
from tests.helpers.loss_documents import pack, policy_documents, random_statistics, reference_tokens
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


# Values of keys.
NO_KEYS = {"mse", "low_var_kl", "tis", "icepop", "seq", "constant", "documents"}
NO_KEYS |= {"gpg", "cispo", "gspo", "k1", "k3", "straight_through"}


def test_messages_know_the_names_elsewhere_that_the_documents_list() -> None:
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    table = text.split("### Their names elsewhere")[1].split("###")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for here, *elsewhere in rows:
        if "with_kl_in_rewards" in here:  # is done to the data
            continue
        keys = {"type", *re.findall(r"`(\w+)", here)}
        for name in {*re.findall(r"`(\w+)", " ".join(elsewhere))} - keys - NO_KEYS:
            assert {path.partition(".")[0] for path in ALIASES[name]} & keys, name


def test_messages_know_the_losses_of_others_that_the_documents_list() -> None:
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    table = text.split("## The losses")[1].split("###")[0]
    names = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([a-z]\w+)`", line.split("|")[-2])
    }
    assert len(names) > 20
    keys = {name for config in BUILT_IN for name in config.model_fields}
    unknown = names - set(TYPES) - set(TYPE_ALIASES) - set(ALIASES) - keys
    assert unknown == {"group_advantages", "sequence"}  # of the data, and a value


def test_the_names_of_the_messages_are_no_keys_and_what_they_stand_for_is_there() -> None:
    for name, paths in ALIASES.items():
        for path in paths:
            first, *rest = path.split(".")
            sections = [config for config in BUILT_IN if first in config.model_fields]
            assert sections, path
            assert not any(name in config.model_fields for config in sections), name
            if rest:
                options = PolicyGradientLossConfig.model_fields[first].annotation
                for key in rest:
                    (section,) = (item for item in get_args(options) if item is not type(None))
                    options = section.model_fields[key].annotation
    for name, loss in TYPE_ALIASES.items():
        assert name not in TYPES
        assert re.match(r"`(\w+)`", loss)[1] in TYPES  # type: ignore[index]


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
