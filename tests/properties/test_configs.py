"""What a config accepts comes back from its YAML, and trains a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from fastrl.config import ConfigError, RunConfig, UserError, dump_config, parse_config
from fastrl.config.yaml_text import dump_yaml, parse_yaml
from fastrl.environments import Problem
from fastrl.training.context import build_context
from fastrl.training.environment import RunEnvironment, Scores
from fastrl.training.phases import Phase
from fastrl.training.rollout_sources import build_sources
from tests.helpers.random_configs import changed_run
from tests.helpers.rollout_file import write_rollout_file
from tests.helpers.runs import TINY
from tests.properties.profile import examples

RANDOMS = st.randoms(use_true_random=False)
# Of what only the run knows: the tokenizer, the device, the problems of a task.
NEEDED = ("`model`", "`model.", "`environment.")


def from_sampler() -> dict[str, Any]:
    """A supervised phase, and one that samples."""
    values: dict[str, Any] = parse_yaml(TINY)
    values["environment"].update(train_prompts=40, heldout_prompts=4)
    supervised, rl = values["phases"]
    supervised.update(steps=1, documents_per_step=6)
    rl.update(steps=1)
    rl["rollouts"].update(prompts_per_step=3, group_size=2)
    return values


def from_files(rollouts: Path) -> dict[str, Any]:
    """A phase on a rollout file with all columns, without an environment."""
    values = from_sampler()
    values["environment"] = None
    values["phases"] = values["phases"][1:]
    values["phases"][0]["rollouts"] = {
        "type": "files", "paths": [str(rollouts)], "documents_per_step": 4,
    }  # fmt: skip
    return values


def accepted(values: dict[str, Any]) -> RunConfig:
    """The config of plain values; examples that it refuses are left out."""
    try:
        return parse_config(RunConfig, values, ())
    except ConfigError:
        reject()


@given(RANDOMS, st.integers(1, 6), st.booleans())
@examples(60)
def test_an_accepted_config_comes_back_from_its_yaml(
    random: Random, num_changes: int, is_on_files: bool
) -> None:
    base = from_files(Path("rollouts.jsonl")) if is_on_files else from_sampler()
    values = changed_run(random, base, num_changes)
    config = accepted(values)
    text = dump_config(config)
    assert parse_config(RunConfig, parse_yaml(text), ()) == config
    assert dump_config(parse_config(RunConfig, parse_yaml(text), ())) == text
    assert parse_yaml(dump_yaml(values)) == values


@pytest.fixture
def _varied_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(
        _: RunEnvironment, problems: Sequence[Problem], answers: Sequence[str | None]
    ) -> Scores:
        return Scores([float(number % 3) for number, _ in enumerate(answers)], {})

    monkeypatch.setattr(RunEnvironment, "score", score)


@pytest.mark.usefixtures("_varied_rewards")
def test_an_accepted_config_trains_a_step(tmp_path: Path) -> None:
    """Or is refused before the run begins, by what only its tokenizer, device or task tell."""
    rollouts = tmp_path / "rollouts.jsonl"
    write_rollout_file(rollouts)
    bases = [from_sampler(), from_files(rollouts)]
    trained = []

    @given(RANDOMS, st.integers(1, 6), st.sampled_from(bases))
    @examples(40)
    def run(random: Random, num_changes: int, base: dict[str, Any]) -> None:
        config = accepted(changed_run(random, base, num_changes))
        try:
            context = build_context(config)
            sources = build_sources(config, context, first=0)
        except UserError as error:
            if not str(error).startswith(NEEDED):
                raise
            return
        for index in range(len(config.phases)):
            result = Phase(config, index, context, sources[index]).step()
            assert all(math.isfinite(value) for value in result.metrics.values())
            assert result.skipped_in_a_row == 0
        trained.append(config)

    run()
    assert len(trained) >= 20
