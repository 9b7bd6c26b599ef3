"""Gradients and logits that are not finite: updates left out, one message when it does not end."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from fastrl.cli import main
from fastrl.config import UserError
from fastrl.models.checkpoint import read_json
from fastrl.training.checkpoint import latest_checkpoint
from tests.helpers.poisoned import poison
from tests.helpers.runs import begin_phase, final_weights, tiny_context, write_tiny


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_norm", ["null", "1.0"])
def test_rl28_an_update_with_bad_gradients_changes_nothing(
    bad: float, max_norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, context = tiny_context(
        f"phases.0.optimizer.max_grad_norm={max_norm}", "phases.0.optimizer.weight_decay=0.1"
    )
    phase = begin_phase(config, 0, context)
    poison(monkeypatch, {1}, bad)
    results, weights, moments = [], [], []
    for _ in range(3):
        results.append(phase.step())
        weights.append([p.detach().clone() for p in context.model.module.parameters()])
        states = phase.optimizer.state.values()
        moments.append([value.clone() for state in states for value in state.values()])
    assert [result.metrics["skipped_updates"] for result in results] == [0, 1, 0]
    assert "loss" not in results[1].metrics
    for values in (weights, moments):
        assert all(map(torch.equal, values[0], values[1]))
        assert not any(map(torch.equal, values[1], values[2]))
        assert all(value.isfinite().all() for value in values[2])


def _train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Collection[int], bound: int
) -> int:
    poison(monkeypatch, bad)
    overrides = [f"phases.0.optimizer.max_skipped_updates={bound}", "checkpoint.every=2"]
    config = str(write_tiny(tmp_path))
    return main(["train", config, "--run-dir", str(tmp_path / "run"), *overrides])


@pytest.mark.parametrize("bound", [0, 2])
def test_rl28_more_in_a_row_than_the_bound_end_the_run(
    bound: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = {2, 3, 5, 6, 7} if bound else {3}
    assert _train(tmp_path, monkeypatch, bad, bound) == 2
    error = capsys.readouterr().err
    last = max(bad) + 1
    assert (
        f"step {last} (phase `supervised`): grad_norm must be finite, was not in {bound + 1} "
        f"updates one after another (`optimizer.max_skipped_updates` is {bound}); the run ends here"
    ) in error
    assert "Traceback" not in error
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "skipped_updates" in record]
    skipped = {record["step"] - 1 for record in steps if record["skipped_updates"]}
    assert skipped == bad - {last - 1}
    assert all(weight.isfinite().all() for weight in final_weights(tmp_path / "run").values())
    state = read_json(latest_checkpoint(tmp_path / "run") / "trainer" / "progress.json")
    assert (state["step"], state["skipped_in_a_row"]) == ((6, 1) if bound else (2, 0))


def test_rl28_a_step_counts_the_updates_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config, context = tiny_context("phases.1.mini_batches=2", "phases.1.epochs=2")
    phase = begin_phase(config, 1, context)
    poison(monkeypatch, {1, 2})
    result = phase.step()
    assert (result.metrics["skipped_updates"], result.skipped_in_a_row) == (2, 2)
    assert phase.skipped_in_a_row == 0
    assert all(map(torch.isfinite, map(torch.tensor, result.metrics.values())))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_e21_a_broken_model_gives_no_tokens(temperature: float) -> None:
    context = tiny_context()[1]
    sampler = context.sampler
    with torch.no_grad():
        next(context.model.module.parameters())[3, 0] = torch.nan
    with pytest.raises(UserError, match=r"the model's logits, .* must be finite"):
        sampler.sample([[5, 12], [3, 3]], num_each=2, temperature=temperature)


def test_e21_weights_that_overflow_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "dtype=float32",
        "phases.1.mini_batches=1",
        "phases.1.optimizer.learning_rate=1e38",
    ]
    config = str(write_tiny(tmp_path))
    assert main(["train", config, "--run-dir", str(tmp_path / "run"), *overrides]) == 2
    error = capsys.readouterr().err
    assert "must be finite" in error
    assert "Traceback" not in error


def test_e21_a_temperature_too_small_is_one_message() -> None:
    sampler = tiny_context("dtype=float32")[1].sampler
    with pytest.raises(UserError, match=r"divided by the temperature 1e-300, must be finite"):
        sampler.sample([[5, 12]], temperature=1e-300)
