"""Terminals that are not UTF-8: what they lack is replaced in every command, and runs go on."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fastrl.cli import main
from fastrl.config import RunConfig, parse_config
from fastrl.config.yaml_text import parse_yaml
from fastrl.training import run as training_run
from tests.helpers.runs import tiny, write_tiny

# A model with more ids than characters samples U+FFFD, which none of these encodings has.
SMALL = ["environment.train_prompts=40", "environment.heldout_prompts=2"]
OVERRIDES = [*SMALL, "model.vocab_size=400", "phases.0.steps=1", "phases.1.steps=1"]
ENCODINGS = ["ascii", "latin-1", "cp1252"]
SHOWS = [("ascii", False), ("latin-1", True), ("cp1252", True)]
Capture = Callable[[str], tuple[io.BytesIO, io.BytesIO]]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Streams as Python opens them: strict output, errors of another handler."""

    def opened(encoding: str) -> tuple[io.BytesIO, io.BytesIO]:
        out, error = io.BytesIO(), io.BytesIO()
        out_stream = io.TextIOWrapper(out, encoding=encoding, errors="strict")
        error_stream = io.TextIOWrapper(error, encoding=encoding, errors="strict")
        monkeypatch.setattr(sys, "stdout", out_stream)
        monkeypatch.setattr(sys, "stderr", error_stream)
        return out, error

    return opened


def _printed(bytes_: io.BytesIO, encoding: str) -> str:
    sys.stdout.flush()
    sys.stderr.flush()
    return bytes_.getvalue().decode(encoding)


@pytest.mark.parametrize(("encoding", "live"), SHOWS)
def test_p21_a_run_shows_samples_on_any_terminal(
    tmp_path: Path,
    terminal: Capture,
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    live: bool,
) -> None:
    config, run = str(write_tiny(tmp_path)), tmp_path / "l\u00e4uf\u2603"
    out, error = terminal(encoding)
    if live:
        monkeypatch.setattr(
            training_run,
            "Console",
            lambda quiet: Console(quiet=quiet, force_terminal=True, width=90, legacy_windows=False),
        )
    assert main(["train", config, "--run-dir", str(run), *OVERRIDES]) == 0
    text = _printed(out, encoding)
    assert "held-out reward: " in text
    assert "?" in text
    if live:
        return
    assert main(["eval", str(run)]) == 0
    assert main(["sample", str(run), "1 + 1 =", "--num", "2"]) == 0
    assert main(["sample", str(run), "1 + \u2603 ="]) == 2
    assert _printed(out, encoding).count("1 + 1 =") >= 2
    message = _printed(error, encoding)
    assert message.startswith("fastrl: error: ")
    assert "has no '?'" in message


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_p21_commands_about_configs_on_any_terminal(
    tmp_path: Path, terminal: Capture, encoding: str
) -> None:
    config = str(write_tiny(tmp_path))
    out, error = terminal(encoding)
    override = "environment.prompt='\u2603 {question} ='"
    characters = "tokenizer.characters='\u26030123456789+-= '"
    assert main(["config", "check", config, override, characters]) == 0
    # A config is never printed as another one.
    printed = parse_config(RunConfig, parse_yaml(_printed(out, encoding)))
    assert printed == tiny(override, characters)
    assert main(["config", "schema"]) == 0
    assert main(["estimate", config, override, characters]) == 0
    assert main(["config", "check", config, "seed='\u2603'"]) == 2
    assert main(["config", "check", str(tmp_path / "\u2603.yaml")]) == 2
    assert main(["train", config, "--run-dir", str(tmp_path / "run"), "\u2603=1"]) == 2
    with pytest.raises(SystemExit):
        main(["--\u2603"])
    assert _printed(error, encoding).count("error: ") == 4
