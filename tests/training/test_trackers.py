"""Weights & Biases and trackio get what metrics.jsonl has, and go on in their own runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.config import ConfigError
from fastrl.training import trackers
from fastrl.training.log_files import iter_metrics
from tests.helpers.runs import tiny, write_tiny

# Stands in for both packages: each call of a run is a line of a file.
PACKAGE = """
import json, pathlib
class Run:
    def log(self, values, step=None):
        write("log", [values, step])
    def define_metric(self, name, step_metric):
        write("define", [name, step_metric])
    def finish(self):
        write("finish", None)
def init(**options):
    write("init", options)
    if pathlib.Path(__file__).with_name("offline").exists():
        raise ConnectionError("no login")
    return Run()
def write(call, value):
    with pathlib.Path(__file__).with_suffix(".calls").open("a") as file:
        file.write(json.dumps([call, value], default=str) + "\\n")
"""
STEPS = ["phases.0.steps=2", "phases.1.steps=1", "environment.heldout_prompts=2"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name in ("wandb", "trackio"):
        (folder / f"{name}.py").write_text(PACKAGE, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _calls(site: Path, name: str) -> list[tuple[str, Any]]:
    lines = (site / f"{name}.calls").read_text(encoding="utf-8").splitlines()
    return [(kind, value) for kind, value in map(json.loads, lines)]


def test_trackers_get_the_metrics_and_a_resumed_run_goes_on_in_its_own(
    site: Path, tmp_path: Path
) -> None:
    options = [*STEPS, "logging.wandb=true", "logging.trackio=true", "logging.project=sums"]
    run = tmp_path / "run"
    command = ["train", str(write_tiny(tmp_path)), "--run-dir", str(run), *options]
    assert main(command) == 0
    records = [*iter_metrics(run)]
    wandb, trackio = _calls(site, "wandb"), _calls(site, "trackio")
    ids = json.loads((run / "trackers.json").read_text(encoding="utf-8"))
    for name, calls in (("wandb", wandb), ("trackio", trackio)):
        kind, started = calls[0]
        assert kind == "init"
        assert (started["project"], started["resume"]) == ("sums", "allow")
        assert started["config"]["seed"] == 3
        assert ids[name] in (started.get("id"), started["name"].removeprefix("run-"))
        assert calls[-1] == ("finish", None)
    logged = [value for kind, value in trackio if kind == "log"]
    assert len(logged) == len(records)
    for (values, step), record in zip(logged, records, strict=True):
        names = {n: v for n, v in record.items() if n not in ("step", "phase")}
        assert step == record["step"]
        assert values == {trackers.tag(record["phase"], n): v for n, v in names.items()}
    assert wandb[1:2] == [("define", ["*", "step"])]
    steps = [value[0]["step"] for kind, value in wandb if kind == "log"]
    assert steps == [record["step"] for record in records]
    (run / "checkpoints" / "latest").write_text("supervised-000002\n", encoding="utf-8")
    assert main([*command, "--resume"]) == 0
    started_ids = {value["id"] for kind, value in _calls(site, "wandb") if kind == "init"}
    assert started_ids == {ids["wandb"]}


def test_a_tracker_that_does_not_start_leaves_nothing(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "offline").touch()
    run = tmp_path / "run"
    arguments = [str(write_tiny(tmp_path)), "--run-dir", str(run), *STEPS, "logging.trackio=true"]
    assert main(["train", *arguments]) == 2
    assert "`logging.trackio`: trackio does not start: no login; " in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == [".lock"]
    (site / "offline").unlink()
    assert main(["train", *arguments]) == 0


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda package: None if package == name else find(package)
    )
    run = tmp_path / "run"
    arguments = [str(write_tiny(tmp_path)), "--run-dir", str(run), f"logging.{name}=true"]
    assert main(["train", *arguments]) == 2
    expected = f"`logging.{name}` needs the {name} package; install it with: pip install {name}"
    assert expected in capsys.readouterr().err
    assert not run.exists()


def test_a_project_without_a_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match="`project` has no effect without `wandb: true`"):
        tiny("logging.project=sums")
