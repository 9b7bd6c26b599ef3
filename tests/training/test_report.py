"""report.png and the last line: what a run can know, named as what it is."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.config import RunConfig, parse_config
from fastrl.training import run as running
from fastrl.training.environment import RunEnvironment, Scores
from fastrl.training.file_summary import FileSummary
from fastrl.training.report import report_figure
from tests.helpers.runs import tiny, write_tiny

FILES = {"type": "files", "paths": ["x.jsonl"], "documents_per_step": 2}


class Record(dict[str, Any]):
    """A record that can be watched."""


def _on_files() -> RunConfig:
    config = tiny().model_dump(mode="json")
    phase = {"type": "rl", "steps": 5, "rollouts": FILES, "losses": {"policy": {"type": "gspo"}}}
    return parse_config(RunConfig, config | {"environment": None, "phases": [phase]})


def _step(step: int, phase: str, **more: float) -> dict[str, Any]:
    metrics = {"policy/loss": -1e-9 * step, "policy/entropy": 1.5, "policy/clip_fraction": 0.1}
    metrics |= {"policy/kl_old_new": 2e-5 + 1e-9 * step}
    return {"step": step, "phase": phase, "loss": -1e-9, **metrics, **more}


def _labels(axis: Any) -> list[str]:
    return [line.get_label() for line in axis.lines if not line.get_label().startswith("_")]


def _legend(axis: Any) -> list[str]:
    legend = axis.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_b6_a_report_on_files_shows_what_they_tell() -> None:
    records = [_step(step, "rl", reward=0.5) for step in range(1, 6)]
    figure = report_figure(records, _on_files())
    reward, divergence, entropy, clipped = figure.axes  # no right-hand axis
    assert _labels(reward) == _legend(reward) == ["of the files"]
    assert divergence.get_title() == "KL(old, new) (nats a token)"
    assert divergence.lines[0].get_ydata()[0] == pytest.approx(2e-5, rel=1e-3)
    for axis in (divergence, entropy, clipped):
        assert _labels(axis) == _legend(axis) == ["policy"]
    figure.canvas.draw()
    for axis in figure.axes:
        assert "+" not in axis.yaxis.get_offset_text().get_text()
        assert all(float(tick).is_integer() for tick in axis.get_xticks())


def test_b6_files_without_rewards_have_no_empty_legend() -> None:
    figure = report_figure([_step(step, "rl") for step in (1, 2)], _on_files())
    assert (_labels(figure.axes[0]), _legend(figure.axes[0])) == ([], [])


def test_b6_a_report_of_sampled_phases_tells_training_and_held_out_apart() -> None:
    supervised = {"step": 1, "phase": "supervised", "answers/loss": 2.0, "policy/loss": 3.0}
    heldout = {"step": 0, "phase": "supervised", "heldout/reward": 0.1}
    records = [heldout, supervised, *(_step(step, "rl", reward=0.5) for step in (2, 3))]
    reward, loss, *_, divergence = report_figure(records, tiny()).axes
    assert _legend(reward) == ["training", "held out"]
    # The loss of the same name is shown where it is none of a policy.
    assert _labels(loss) == ["answers", "policy"]
    assert loss.lines[1].get_ydata() == [3.0]
    assert _labels(divergence) == ["policy (right)"]
    assert _legend(divergence) == ["answers", "policy", "policy (right)"]


def test_a_phase_that_had_nothing_to_learn_is_named() -> None:
    summary = FileSummary()
    assert summary.warning("rl") is None
    summary.add({"loss": 1.0})  # a supervised phase knows of no groups
    assert summary.warning("rl") is None
    for _ in range(3):
        summary.add({"reward": 1.0, "active_groups": 0.0})
    warning = summary.warning("rl")
    assert warning is not None
    assert warning.startswith("warning: phase `rl` had nothing to learn from rewards: in none of ")
    assert "its 3 steps" in warning
    summary.add({"reward": 1.0, "active_groups": 0.25})
    assert summary.warning("rl") is None


@pytest.mark.parametrize("reads_late", [False, True])
def test_a_run_with_equal_rewards_ends_with_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reads_late: bool,
) -> None:
    def score(_: RunEnvironment, problems: list[object], answers: list[object]) -> Scores:
        return Scores([0.5] * len(answers), {})

    monkeypatch.setattr(RunEnvironment, "score", score)
    # The warning is of all steps: the last one is read before it.
    monkeypatch.setattr(running, "_runs_ahead", lambda device: reads_late)
    command = ["train", str(write_tiny(tmp_path)), "--run-dir", str(tmp_path / "run")]
    overrides = ["phases.0.steps=1", "phases.1.steps=1", "environment.heldout_prompts=2"]
    assert main([*command, *overrides]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "nothing to learn" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: phase `rl` had nothing to learn from rewards")


def test_b6_the_last_line_tells_each_loss_apart_and_what_is_missing() -> None:
    summary = FileSummary()
    assert summary.line(["a"]) == "no steps"
    summary.add({"reward": 1.0, "active_groups": 0.0})  # nothing to learn from
    summary.add({"reward": 0.0, "loss": 0.0, "a/kl_old_new": 1e-3, "b/kl_old_new": 2e-3})
    summary.add({"reward": 0.5, "loss": 0.0, "a/kl_old_new": 3e-3, "b/kl_old_new": 4e-3})
    kls = "KL(old, new) of a: 0.0010 -> 0.0030, KL(old, new) of b: 0.0020 -> 0.0040"
    assert summary.line(["a", "b"]) == f"reward of the files: 0.50, {kls}"
    bare = FileSummary()
    bare.add({"loss": 0.0})
    assert bare.line(["a"]) == "trained on files, without metrics"


def test_the_records_of_a_long_run_are_not_kept() -> None:
    alive: list[weakref.ref[Record]] = []

    def records() -> Iterator[Record]:
        for step in range(1, 101):
            assert sum(reference() is not None for reference in alive) <= 1
            record = Record(_step(step, "rl", reward=0.5))
            alive.append(weakref.ref(record))
            yield record

    reward = report_figure(records(), _on_files()).axes[0]
    assert len(reward.lines[0].get_xdata()) == 100


def test_a_report_shows_what_a_sampled_run_knows_beside() -> None:
    heldout = {"step": 0, "phase": "rl", "heldout/reward": 0.1, "heldout/finished": 0.25}
    more = {"grad_norm": 2.0, "completion_length": 7.0, "finished": 0.875, "policy/kl_ref": 0.01}
    records = [heldout, *(_step(step, "rl", reward=0.5, **more) for step in (1, 2))]
    figure = report_figure(records, tiny())
    panels = {axis.get_title(): axis for axis in figure.axes}
    lines = {
        title: {line.get_label(): list(line.get_ydata()) for line in axis.lines}
        for title, axis in list(panels.items())[4:]
    }
    assert lines == {
        "gradient norm": {"before clipping": [2.0, 2.0]},
        "KL(new, reference) (nats a token)": {"policy": [0.01, 0.01]},
        "completion length (tokens)": {"training": [7.0, 7.0]},
        "share of truncated completions": {"training": [0.125, 0.125], "held out": [0.75]},
    }
    for title in ("reward", "share of truncated completions"):  # a point alone is seen
        (line,) = (each for each in panels[title].lines if each.get_label() == "held out")
        assert (line.get_marker(), line.get_color()) == ("o", "black")
    without = [
        {name: value for name, value in record.items() if "kl_ref" not in name}
        for record in records
    ]
    figure = report_figure(without, tiny())
    assert len(figure.axes) == 7
    figure.canvas.draw()
    assert [axis.get_title() for axis in figure.axes if axis.get_xlabel() == "step"] == [
        "gradient norm",
        "share of truncated completions",
    ]
