"""The command line: arguments, exit codes, and one message for a mistake."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fastrl import cli
from fastrl.cli import main
from fastrl.config import RunConfig, parse_config
from fastrl.config.yaml_text import parse_yaml
from fastrl.training import run

RUN = """
environment: {type: reasoning_gym, task: chain_sum}
model: {type: llama, head: {losses: {policy: {type: gspo}}}}
phases: [{type: rl, steps: 3}]
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN, encoding="utf-8")
    return path


def test_check_prints_the_resolved_config(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", str(run_file), "phases.0.steps=7", "seed=5"]) == 0
    printed = capsys.readouterr().out
    config = parse_config(RunConfig, parse_yaml(printed))
    assert config == parse_config(RunConfig, parse_yaml(RUN), ["phases.0.steps=7", "seed=5"])
    assert (config.seed, config.phases[0].steps) == (5, 7)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sed=1"], "override `sed=1`: unknown key `sed` at the top level; did you mean `seed`?"),
        (["seed"], "override `seed`: must read `key.path=value`"),
        (["phases.1.steps=1"], "override `phases.1.steps=1`: `phases` is a list of 1, so"),
        (
            ["phases.0.optimizer.learning_rate=true"],
            "override `phases.0.optimizer.learning_rate=true`:"
            " `phases.0.optimizer.learning_rate` must not be a boolean, got true",
        ),
    ],
)
def test_y2_a_mistake_is_one_line_and_exit_code_2(
    run_file: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert main(["config", "check", str(run_file), *overrides]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fastrl: error: {message}")
    assert err.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "fastrl", "config", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("command", [["config", "check"], ["train", "--run-dir", "new"]])
def test_a_missing_config_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "fastrl", *command, "none.yaml"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    expected = "fastrl: error: none.yaml: cannot be read: No such file or directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
    assert list(tmp_path.iterdir()) == []


def test_sources_that_are_not_installed_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", version)
    assert main(["config", "schema"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    words = " ".join(capsys.readouterr().out.split())  # argparse breaks lines
    assert words.endswith("fastrl, not installed, so it has no version")


def test_overrides_stand_before_and_after_options(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[RunConfig, Path, bool]] = []

    def train(config: RunConfig, run_dir: Path, *, resume: bool) -> int:
        called.append((config, run_dir, resume))
        return 0

    monkeypatch.setattr(run, "train", train)

    arguments = ["seed=1", "--run-dir", "runs/x", "phases.0.steps=2", "phases.0.epochs=3"]
    assert main(["train", str(run_file), *arguments]) == 0
    config = parse_config(RunConfig, parse_yaml(RUN), [arguments[0], *arguments[3:]])
    assert called == [(config, Path("runs/x"), False)]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train", "run.yaml"],
        ["train", "run.yaml", "--run-dir", "x", "--stpes=3"],
        ["config", "schema", "a=1"],
        ["sample", "run", "1 + 1 =", "--num", "0"],
        ["sample", "run", "1 + 1 =", "--temperature", "-1"],
        ["sample", "run", "1 + 1 =", "--temperature", "nan"],
        ["sample", "run", "1 + 1 =", "--temperature", "1e-300"],
        ["train", "run.yaml", "--run-dir", "a\0b"],
        ["sample", "run", "1 + 1 =", "--max-tokens", "x"],
    ],
)
def test_wrong_arguments_give_the_usage_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: fastrl")


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Names of the parser and of all below it."""
    yield parser.prog
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _commands(each)


@pytest.mark.parametrize("command", [*_commands(cli._parser())])
def test_help_ends_with_examples_that_the_command_takes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()
    with pytest.raises(SystemExit, match="0"):
        main([*words[1:], "--help"])
    _, _, examples = capsys.readouterr().out.partition("\nexample:\n")
    assert examples
    for line in examples.splitlines():
        shown = shlex.split(line.partition(" > ")[0])
        assert shown[: len(words)] == words
        assert callable(cli._arguments(shown[1:]).command)


def test_the_schema_describes_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    bare = [
        f"{name}.{key}"
        for name, section in {"RunConfig": schema, **schema["$defs"]}.items()
        for key, value in section.get("properties", {}).items()
        if "description" not in value and key != "type"
    ]
    assert bare == []
    assert schema["additionalProperties"] is False
