"""`fastrl train`, `eval` and `sample`, from the command line to the files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.cli import main
from fastrl.config import RunConfig, load_config
from fastrl.models.checkpoint import load_llama
from fastrl.training.log_files import iter_metrics
from tests.helpers.runs import FinishedRun, final_weights, tiny, write_tiny


def _train(folder: Path, name: str, *overrides: str, code: int = 0) -> Path:
    run_dir = folder / name
    config = write_tiny(folder)
    assert main(["train", str(config), "--run-dir", str(run_dir), *overrides]) == code
    return run_dir


def _without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = {"seconds", "tokens_per_second"}
    return [{key: record[key] for key in record if key not in timed} for record in records]


def test_the_last_line_compares_the_heldout_reward(finished: FinishedRun) -> None:
    assert finished.exit_code == 0
    last = finished.out.splitlines()[-1]
    match = re.fullmatch(r"held-out reward: (\d\.\d\d) -> (\d\.\d\d) \(grpo, \d+ s\)", last)
    assert match is not None, last
    rewards = [r["heldout/reward"] for r in iter_metrics(finished.folder) if "heldout/reward" in r]
    assert len(rewards) == 2 + 5 + 1 + 1  # before each phase; every 2 steps within; at the end
    assert match.groups() == (f"{rewards[6]:.2f}", f"{rewards[-1]:.2f}")


def test_the_supervised_phase_learns(finished: FinishedRun) -> None:
    losses = [
        r["loss"]
        for r in iter_metrics(finished.folder)
        if r["phase"] == "supervised" and "loss" in r
    ]
    assert len(losses) == 12
    assert losses[-1] < 0.7 * losses[0]


def test_metrics_hold_what_a_plot_needs(finished: FinishedRun) -> None:
    records = [r for r in iter_metrics(finished.folder) if "reward" in r]
    assert [record["step"] for record in records] == [13, 14, 15, 16]
    for record in records:
        assert {"policy/entropy", "policy/clip_fraction", "policy/loss", "grad_norm"} <= set(record)
        assert record["single_pass"] == 1.0
        assert 0 <= record["reward"] <= 1
        assert record["tokens_per_second"] > 0


def test_a_run_leaves_its_files_and_nothing_half_written(finished: FinishedRun) -> None:
    run = finished.folder
    names = {path.name for path in run.iterdir()}
    files = {"config.yaml", "metrics.jsonl", "samples.jsonl", "report.png"}
    assert names == files | {".lock", "checkpoints", "tensorboard"}
    checkpoints = {path.name for path in (run / "checkpoints").iterdir()}
    assert checkpoints == {"supervised-000012", "rl-000016", "latest"}
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    sample = json.loads((run / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert set(sample) == {"step", "phase", "prompt", "completion", "reward", "finished"}


def test_tensorboard_has_the_same_numbers(finished: FinishedRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.folder / "tensorboard")).Reload()
    rewards = [r for r in iter_metrics(finished.folder) if "reward" in r]
    written = [(event.step, event.value) for event in events.Scalars("rl/reward")]
    assert written == [(r["step"], pytest.approx(r["reward"])) for r in rewards]


def test_the_resolved_config_loads_back(finished: FinishedRun) -> None:
    overrides = ["logging.tensorboard=true", "logging.report=true", "evaluation.every=2"]
    assert load_config(RunConfig, finished.folder / "config.yaml") == tiny(*overrides)


def test_a_checkpoint_is_a_llama_folder(finished: FinishedRun) -> None:
    llama = load_llama(finished.folder / "checkpoints" / "rl-000016", dtype=torch.float64)
    assert llama.config.vocab_size == 15
    assert llama.config.eos_token_id == 0


def test_eval_gives_the_reward_of_the_run(
    finished: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(finished.folder)]) == 0
    reward = [*iter_metrics(finished.folder)][-1]["heldout/reward"]
    assert capsys.readouterr().out.splitlines()[-1] == f"held-out reward: {reward:.3f}"


def test_eval_takes_overrides(finished: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(finished.folder), "evaluation.temperature=0"]) == 0
    assert "16 held-out prompts x 1, temperature 0, " in capsys.readouterr().out


def test_sample_completes_a_prompt(
    finished: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sample", str(finished.folder), "4 + 3 =", "--num", "3"]
    assert main([*arguments, "--temperature", "0"]) == 0
    greedy = capsys.readouterr().out.splitlines()
    assert len(greedy) == 3
    assert len(set(greedy)) == 1
    assert re.fullmatch(r"4 \+ 3 =[0-9+=\- ]{0,3}", greedy[0])
    assert main([*arguments, "--max-tokens", "1"]) == 0
    assert all(len(line) <= 8 for line in capsys.readouterr().out.splitlines())


def test_a_seed_gives_one_run(tmp_path: Path, finished: FinishedRun) -> None:
    again = _train(tmp_path, "again", "evaluation.every=2")
    other = _train(tmp_path, "other", "evaluation.every=2", "seed=4")
    metrics = _without_times([*iter_metrics(finished.folder)])
    assert _without_times([*iter_metrics(again)]) == metrics
    assert _without_times([*iter_metrics(other)]) != metrics
    torch.testing.assert_close(final_weights(again), final_weights(finished.folder), rtol=0, atol=0)


def test_evaluations_and_checkpoints_do_not_change_a_run(
    tmp_path: Path, finished: FinishedRun
) -> None:
    run = _train(tmp_path, "run", "checkpoint.every=1", "logging.samples_every=1")
    torch.testing.assert_close(final_weights(run), final_weights(finished.folder), rtol=0, atol=0)
    kept = {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()}
    assert kept == {"rl-000015", "rl-000016"}
