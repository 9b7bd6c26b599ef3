"""Configs from YAML and overrides, and what a mistake in them is answered with."""

import errno
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fastrl.config import (
    Config,
    ConfigError,
    GRPOLossConfig,
    HeadOptions,
    LlamaConfig,
    RunConfig,
    dump_config,
    load_config,
    parse_config,
)
from fastrl.config import save_config as save
from fastrl.config.yaml_text import parse_yaml
from tests.helpers.config_classes import Optimizer, Plain, Reinforced, Run, Scaled, Supervised


def _write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _message(values: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(Run, values, overrides, source="run.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-5", 1e-5),
        ("2e-5", 2e-5),
        ("1.0e5", 1.0e5),
        ("1E-5", 1e-5),
        (".5e-5", 0.5e-5),
        ("'1e-5'", 1e-5),
        ('"0.1"', 0.1),
        ("1", 1.0),
    ],
)
def test_y1_numbers_in_yaml_are_exactly_those_numbers(
    tmp_path: Path, text: str, number: float
) -> None:
    from_file = load_config(Run, _write(tmp_path, f"optimizer:\n  learning_rate: {text}\n"))
    from_override = parse_config(Run, {}, [f"optimizer.learning_rate={text}"])
    in_mapping = parse_config(Run, parse_yaml(f"rates: {{a: {text}}}")).rates["a"]
    for value in (
        from_file.optimizer.learning_rate,
        from_override.optimizer.learning_rate,
        in_mapping,
    ):
        assert type(value) is float
        assert value == number


@pytest.mark.parametrize(
    ("text", "requirement"),
    [
        ("true", "must not be a boolean, got true"),
        ("null", "must be a valid number, got null"),
        ("fast", "must be a valid number, got 'fast'"),
        ("''", "must be a valid number, got ''"),
        ("1e-5x", "must be a valid number, got '1e-5x'"),
        (".nan", "must be a finite number, got nan"),
        ("[1.0]", "must be a valid number, got a list"),
        ("-1e-5", "must be greater than 0, got -1e-05"),
    ],
)
def test_y1_what_is_no_number_is_refused_with_its_key_path(
    tmp_path: Path, text: str, requirement: str
) -> None:
    path = _write(tmp_path, f"optimizer: {{learning_rate: {text}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Run, path)
    assert str(caught.value) == f"{path}: `optimizer.learning_rate` {requirement}"


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"seed": True}, "seed"),
        ({"rates": {"a": 1, "b": False}}, "rates"),
        ({"optimizer": {"betas": [0.9, True]}}, "optimizer.betas"),
        ({"phases": [{"type": "rl", "steps": True}]}, "phases.0.steps"),
        ({"stop": True}, "stop"),
    ],
)
def test_y1_booleans_are_no_numbers(values: dict[str, Any], path: str) -> None:
    assert f"run.yaml: `{path}` must not be a boolean, got " in _message(values)


def test_booleans_pass_where_they_are_declared() -> None:
    config = parse_config(Run, {"optimizer": {"fused": True}, "environment": {"a": [True]}})
    assert config.optimizer.fused is True
    assert config.environment == {"a": [True]}


_LOSS = {"type": "gspo"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"learning_rate": 1.0},
            "unknown key `learning_rate` at the top level; did you mean `optimizer.learning_rate`?",
        ),
        (
            {"optimizer": {"learning-rate": 1.0}},
            "unknown key `learning-rate` in `optimizer`; did you mean `learning_rate`?",
        ),
        (
            {"num-epochs": 1},
            "unknown key `num-epochs` at the top level; its keys are `seed`, `name`, `rope`,"
            " `optimizer`, `phases`, `environment`, `rates`, `seeds`, `stop`",
        ),
        (
            {"phases": [{"type": "rl", "head": {"losses": {"a": {**_LOSS, "epsilon_hgih": 1}}}}]},
            "unknown key `epsilon_hgih` in `phases.0.head.losses.a` (type `gspo`);"
            " did you mean `epsilon_high`?",
        ),
        (
            {"phases": [{"type": "supervised", "group_size": 8}]},
            "unknown key `group_size` in `phases.0` (type `supervised`): it belongs to type `rl`",
        ),
        (
            {"phases": [{"type": "rl", "epsilon_high": 1}]},
            "unknown key `epsilon_high` in `phases.0` (type `rl`);"
            " did you mean `phases.<index>.head.losses.<name>.epsilon_high`?"
            " The keys here are `type`, `steps`, `group_size`, `head`",
        ),
        (
            {"rope": {"type": "plain", "factor": 2}},
            "unknown key `factor` in `rope` (type `plain`): it belongs to type `scaled`",
        ),
        (
            {"rope": {"theta": 2}},
            "`rope` must have a `type`, one of `plain`, `scaled`",
        ),
        (
            {"rope": {"type": "skaled"}},
            "`rope` must have a `type`, one of `plain`, `scaled`, got `skaled`;"
            " did you mean `scaled`?",
        ),
        ({"optimizer": None}, "`optimizer` must be a section of keys and values, got null"),
        ({"phases": {}}, "`phases` must be a list, got a section"),
        ({"stop": "x"}, "`stop` must be a valid integer or a list, got 'x'"),
        ({"seeds": []}, "`seeds` must have at least 1 item(s), got 0"),
        (
            {"optimizer": {"betas": [0.9]}},
            "`optimizer.betas` must have at least 2 item(s), got 1",
        ),
        (
            {"optimizer": {"betas": [0.9, 0.99, 0.5]}},
            "`optimizer.betas` must have at most 2 item(s), got 3",
        ),
        ({"seeds": ["x"]}, "`seeds.0` must be a valid integer, got 'x'"),
    ],
)
def test_y2_misspelt_and_misplaced_keys_are_refused(values: dict[str, Any], message: str) -> None:
    assert _message(values) == f"run.yaml: {message}"


def test_y2_a_loss_refuses_the_keys_of_another_loss() -> None:
    values = {"head": {"losses": {"warm_up": {"type": "cross_entropy", "epsilon_high": 0.2}}}}
    with pytest.raises(ConfigError) as caught:
        parse_config(LlamaConfig, values)
    message = str(caught.value)
    assert message.startswith(
        "config: unknown key `epsilon_high` in `head.losses.warm_up` (type `cross_entropy`):"
        " it belongs to type "
    )
    assert "`grpo`" in message
    assert "`gspo`" in message


LOSS = "phases.0.losses.policy"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            {"type": "grpo", "epsilon": 0.2},
            f"unknown key `epsilon` in `{LOSS}` (type `grpo`); did you mean `epsilon_low` or"
            " `epsilon_high`?",
        ),
        (
            {"type": "gspo", "clip-ratio-low": 0.2},
            f"unknown key `clip-ratio-low` in `{LOSS}` (type `gspo`); did you mean `epsilon_low`?",
        ),
        (
            {"type": "grpo", "beta": 0.2},
            f"unknown key `beta` in `{LOSS}` (type `grpo`); did you mean `kl.coefficient`?",
        ),
        (
            {"type": "grpo", "kl": {"coefficient": 1, "beta": 0.2}},
            f"unknown key `beta` in `{LOSS}.kl`; did you mean `coefficient`?",
        ),
        (
            {"type": "grpo", "loss_type": "dapo"},
            f"unknown key `loss_type` in `{LOSS}` (type `grpo`); did you mean `type` or"
            " `normalisation`?",
        ),
        (
            {"type": "cross_entropy", "clip_ratio_c": 3},
            f"unknown key `clip_ratio_c` in `{LOSS}` (type `cross_entropy`): it is `delta` of type"
            " `grpo`, `gspo`, `gspo_token`, `luspo`",
        ),
        (
            {"type": "dpo", "epsilon": 0.2},
            f"unknown key `epsilon` in `{LOSS}` (type `dpo`): it is `epsilon_low` or"
            " `epsilon_high` of type `grpo`, `gspo`",
        ),
        (
            {"type": "grpo", "force_on_policy_ratio": True},
            f"unknown key `force_on_policy_ratio` in `{LOSS}` (type `grpo`); did you mean"
            " `on_policy`?",
        ),
        ({"type": "ppo"}, "got `ppo`; did you mean `grpo` (the clipped surrogate)?"),
        ({"type": "DAPO"}, "got `DAPO`; did you mean `grpo` with `preset: dapo`?"),
        ({"type": "rloo"}, "did you mean `reinforce`, with `advantage.baseline: leave_one_out`"),
        ({"type": "grop"}, "got `grop`; did you mean `grpo`?"),
    ],
)
def test_b7_names_of_other_projects_are_told_by_their_name_here(
    loss: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            RunConfig, {"phases": [{"type": "rl", "steps": 1, "losses": {"policy": loss}}]}
        )
    assert message in str(caught.value)


IN_PHASE = "phases.<index>.losses.<name>"
IN_MODEL = "model.head.losses.<name>"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "phases.0.epsilon=0.2",
            f"in `phases.0` (type `rl`); did you mean `{IN_PHASE}.epsilon_low` or"
            f" `{IN_PHASE}.epsilon_high` or `phases.<index>.optimizer.epsilon`?",
        ),
        (
            "epsilon=0.2",
            f"at the top level; did you mean `{IN_MODEL}.epsilon_low` or"
            f" `{IN_MODEL}.epsilon_high` or `phases.<index>.optimizer.epsilon`?",
        ),
        ("phases.0.loss_type=dapo", f"did you mean `{IN_PHASE}.type` or `{IN_PHASE}.normalis"),
        ("phases.0.kl_coef=0.1", f"did you mean `{IN_PHASE}.kl.coefficient`?"),
    ],
)
def test_b7_names_of_other_projects_outside_of_a_loss(override: str, message: str) -> None:
    phase = {"type": "rl", "steps": 1, "losses": {"policy": {"type": "grpo"}}}
    with pytest.raises(ConfigError) as caught:
        parse_config(RunConfig, {"phases": [phase]}, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (GRPOLossConfig, {"epsilon": 0.2}, "did you mean `epsilon_low` or `epsilon_high`?"),
        (GRPOLossConfig, {"delta": 1}, "`delta` must be greater than 1, got 1 "),
        (
            GRPOLossConfig,
            {"kl": {"coefficient": 1, "beta": 0.1}},
            "unknown key `beta` in `kl`; did you mean `coefficient`?",
        ),
        (HeadOptions, {"losses": {"a": {"type": "ppo"}}}, "got `ppo`; did you mean `grpo` (the"),
        (
            HeadOptions,
            {"losses": {"a": {"type": "grpo", "beta": 0.1}}},
            "unknown key `beta` in `losses.a` (type `grpo`); did you mean `kl.coefficient`?",
        ),
    ],
)
def test_b7_a_config_made_in_python_has_the_messages_of_a_file(
    config_class: type[Config], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        config_class(**values)
    assert message in str(caught.value)
    assert "pydantic.dev" not in str(caught.value)
    assert caught.value.error_count() == 1


def test_a_phase_is_no_loss_that_another_project_names() -> None:
    with pytest.raises(ConfigError, match=r"one of `supervised`, `rl`, got `ppo`$"):
        parse_config(RunConfig, {"phases": [{"type": "ppo", "steps": 1}]})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.learning_rat=1",
            "unknown key `learning_rat` in `optimizer`; did you mean `learning_rate`?",
        ),
        (
            "learning_rate=1",
            "unknown key `learning_rate` at the top level; did you mean `optimizer.learning_rate`?",
        ),
        (
            "phases.0.group_size=1",
            "unknown key `group_size` in `phases.0` (type `supervised`): it belongs to type `rl`",
        ),
        ("optimizer.learning_rate=fast", "`optimizer.learning_rate` must be a valid number, got"),
        ("phases.2.steps=1", "`phases` is a list of 1, so `2` must be an index from 0 to 0"),
        ("phases.x.steps=1", "`phases` is a list of 1, so `x` must be an index from 0 to 0"),
        ("phases.-1.steps=1", "`phases` is a list of 1, so `-1` must be an index from 0 to 0"),
        ("seed.x=1", "`seed` is a value and has no keys"),
        ("seed", "must read `key.path=value`"),
        ("=1", "must read `key.path=value`"),
        ("optimizer..fused=1", "must read `key.path=value`"),
        ("stop=[1", "its value is not YAML: line 1, column 3: "),
    ],
)
def test_y2_mistakes_in_overrides_name_the_override(override: str, message: str) -> None:
    found = _message({"seed": 1, "phases": [{"type": "supervised"}]}, override)
    assert found.startswith(f"override `{override}`: {message}")


def test_every_mistake_is_told_at_once_with_where_it_comes_from() -> None:
    message = _message({"sed": 1, "stop": "x"}, "seed=1", "optimizer.betas=3")
    assert message.splitlines() == [
        "override `optimizer.betas=3`: `optimizer.betas` must be a list, got 3",
        "run.yaml: `stop` must be a valid integer or a list, got 'x'",
        "run.yaml: unknown key `sed` at the top level; did you mean `seed`?",
    ]


@pytest.mark.timeout(20)
def test_rl20_the_first_of_many_mistakes_are_listed() -> None:
    values = {f"key_{number}": 1 for number in range(20_000)}
    with pytest.raises(ConfigError) as caught:
        parse_config(RunConfig, values, source="run.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert all(line.startswith("run.yaml: ") for line in lines[:-1])
    assert lines[-1] == "and 19,991 more"  # `phases` is required, too
    short = [{"type": "rl", "steps": 1, "optimizer": {"betas": []}} for _ in range(5_000)]
    with pytest.raises(ConfigError) as caught:
        parse_config(RunConfig, {"phases": short})
    assert str(caught.value).splitlines()[-1] == "and 4,990 more"


def test_a_consequence_of_a_mistake_is_not_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(LlamaConfig, {"num_attention_heads": "x"})
    assert str(caught.value) == "config: `num_attention_heads` must be a valid integer, got 'x'"


def test_overrides_reach_sections_lists_and_mappings() -> None:
    values = {"phases": [{"type": "supervised"}, {"type": "rl", "steps": 5}], "stop": [1, 2]}
    config = parse_config(
        Run,
        values,
        [
            "seed=3",
            "name=a=b",
            "optimizer.betas=[0.8, 9e-1]",
            "phases.1.steps=20",
            "phases.1.head.losses.policy.type=gspo",
            "phases.1.head.losses.policy.epsilon_low=2e-4",
            "stop.1=7",
            "environment.config.max_terms=4",
            "seed=4",
        ],
    )
    policy = config.phases[1]
    assert isinstance(policy, Reinforced)
    assert (config.seed, config.name, config.stop) == (4, "a=b", (1, 7))
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.phases[0] == Supervised()
    assert policy.steps == 20
    assert policy.head.losses["policy"].model_dump()["epsilon_low"] == 2e-4
    assert config.environment == {"config": {"max_terms": 4}}
    assert values == {
        "phases": [{"type": "supervised"}, {"type": "rl", "steps": 5}],
        "stop": [1, 2],
    }


def test_an_override_changes_a_default_section_of_a_union() -> None:
    assert parse_config(Run, {}, ["rope.theta=3e5"]).rope == Plain(theta=3e5)
    scaled = parse_config(Run, {}, ["rope.type=scaled", "rope.factor=2"])
    assert scaled.rope == Scaled(factor=2)


def test_an_override_of_a_file_gives_the_same_as_the_edited_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "optimizer: {learning_rate: 1e-4}\n")
    config = load_config(Run, path, ["optimizer.learning_rate=3E-4"])
    assert config == Run(optimizer=Optimizer(learning_rate=3e-4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: 1\nseed: 2\n", "line 2, column 1: key `seed` stands twice in one section"),
        (b"seed: [\n", "line 2, column 1: "),
        (b"- 1\n", "must be a mapping of keys to values at its top level"),
        (b"seed\n", "must be a mapping of keys to values at its top level"),
        (b"\xff\xfe", "must be UTF-8 text: "),
    ],
)
def test_files_that_are_no_mapping_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(Run, path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file or directory"):
        load_config(Run, tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(Run, tmp_path)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(Run, _write(tmp_path, "# nothing\n")) == Run()


def test_the_resolved_config_loads_back_equal(tmp_path: Path) -> None:
    config = parse_config(
        Run,
        {
            "name": "2e-5",
            "optimizer": {"learning_rate": "2e-5"},
            "phases": [
                {"type": "supervised"},
                {"type": "rl", "head": {"losses": {"policy": {"type": "gspo"}}}},
            ],
            "environment": {"on": True, "no": "yes", "rate": 1e-7, "items": [None, 3]},
            "rates": {"a": 1e22},
            "stop": [1, 2],
        },
    )
    path = tmp_path / "resolved.yaml"
    save(config, path)
    assert load_config(Run, path) == config
    assert dump_config(load_config(Run, path)) == path.read_text(encoding="utf-8")
    assert "learning_rate: 2.0e-05\n" in path.read_text(encoding="utf-8")
    assert [item.name for item in tmp_path.iterdir()] == ["resolved.yaml"]


def test_a_config_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save(LlamaConfig(), tmp_path / "config.yaml")
    assert list(tmp_path.iterdir()) == []


def test_the_defaults_of_a_model_load_back_equal() -> None:
    config = LlamaConfig(hidden_size=96, num_attention_heads=6)
    assert parse_config(LlamaConfig, parse_yaml(dump_config(config))) == config


def test_configs_are_frozen_and_described() -> None:
    config = LlamaConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.hidden_size = 1
    description = LlamaConfig.model_json_schema()["properties"]["hidden_size"]["description"]
    assert description == "Width of the residual stream."


def test_an_environment_with_a_task_alone_is_of_reasoning_gym() -> None:
    values = {"environment": {"task": "chain_sum"}, "phases": [{"type": "supervised", "steps": 1}]}
    values["phases"][0]["losses"] = {"a": {"type": "cross_entropy"}}  # type: ignore[index]
    environment = parse_config(RunConfig, values).environment
    assert environment is not None
    assert environment.type == "reasoning_gym"
