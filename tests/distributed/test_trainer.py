"""`fastrl train` under torchrun: the run of one process on any layout; errors end the job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastrl.cli import main
from fastrl.training.checkpoint import latest_checkpoint
from tests.helpers.killed_runs import forks, train_on_ranks
from tests.helpers.runs import final_weights, write_tiny
from tests.helpers.torchrun import torchrun

# GSPO on documents of a few tokens, so that every cut of the packed sequence cuts some.
CHANGES = {"evaluation": {"every": 20}}
OVERRIDES = [
    "phases.1.steps=2",
    "phases.1.losses.policy.type=gspo",
    "phases.1.advantage={scale: none, kl_in_reward: {coefficient: 1}}",
]
LAYOUTS = {
    "fsdp2": ["parallel.data=2", "parallel.fully_sharded=true"],
    "sdp2_ms2": ["parallel.sequence_data=2", "parallel.micro_sequences=2"],
    "stp2": ["parallel.tensor=2", "parallel.sequence_parallel=true"],
}


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    # The head chooses `single_pass` by what is split over ranks.
    own = ("seconds", "tokens_per_second", "single_pass")
    # The first divergence from the reference is rounding, and with it the sign of what is clipped.
    return [
        {k: v for k, v in record.items() if k not in own and "clip_fraction" not in k}
        for record in records
    ]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_process")
    config = str(write_tiny(folder, CHANGES))
    assert main(["train", config, "--run-dir", str(folder / "run"), *OVERRIDES]) == 0
    last_phase = [record for record in metrics(folder / "run") if record["phase"] == "rl"]
    assert any(record.get("grad_norm", 0) > 0.1 for record in last_phase)
    return folder / "run"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_over_processes_is_that_of_one(tmp_path: Path, one_process: Path, name: str) -> None:
    config, run = str(write_tiny(tmp_path, CHANGES)), tmp_path / "run"
    arguments = ["train", config, "--run-dir", str(run), *OVERRIDES, *LAYOUTS[name]]
    done = torchrun(2, "fastrl", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out reward: ") == 1  # rank 0 alone prints
    for actual, expected in zip(metrics(run), metrics(one_process), strict=True):
        assert actual.pop("phase") == expected.pop("phase")
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-9)
    weights, expected_weights = final_weights(run), final_weights(one_process)
    assert weights.keys() == expected_weights.keys()
    for key, weight in expected_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-6, atol=1e-8)


def test_a_kill_during_a_write_leaves_the_checkpoint_before(
    tmp_path: Path, one_process: Path
) -> None:
    config, run = str(write_tiny(tmp_path, CHANGES)), tmp_path / "run"
    arguments = ["train", config, "--run-dir", str(run), *OVERRIDES, *LAYOUTS["fsdp2"]]
    arguments += ["checkpoint.every=5"]
    assert torchrun(2, "tests.helpers.killed_train", *arguments).returncode != 0
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        *("latest", "supervised-000005", ".supervised-000010.partial")
    }
    assert latest_checkpoint(run).name == "supervised-000005"
    done = torchrun(2, "fastrl", *arguments, "--resume")
    assert done.returncode == 0, done.stderr
    weights, expected_weights = final_weights(run), final_weights(one_process)
    for key, weight in expected_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-6, atol=1e-8)
    assert not list((run / "checkpoints").glob(".*"))


POISONED = {
    "plain": ["parallel.data=2"],
    "fsdp2": LAYOUTS["fsdp2"],
    "stp2": LAYOUTS["stp2"],
}


@pytest.mark.parametrize("name", POISONED)
def test_rl28_all_ranks_leave_out_the_update_of_one(tmp_path: Path, name: str) -> None:
    config, run = str(write_tiny(tmp_path)), tmp_path / "run"
    arguments = ["train", config, "--run-dir", str(run), "phases.0.steps=3", "phases.1.steps=1"]
    done = torchrun(2, "tests.helpers.poisoned_train", *arguments, *POISONED[name])
    assert done.returncode == 0, done.stderr
    skipped = [step["skipped_updates"] for step in metrics(run) if "skipped_updates" in step]
    assert skipped == [0, 1, 0, 0]
    checkpoint = run / "checkpoints" / "supervised-000003"
    state = load_file(checkpoint / "trainer" / "optimizer.safetensors")
    assert {int(value) for name, value in state.items() if name.endswith(".step")} == {2}
    assert all(weight.isfinite().all() for weight in final_weights(run).values())


def test_a_failing_rank_ends_the_job_with_its_own_error(tmp_path: Path) -> None:
    config = str(write_tiny(tmp_path))
    start = time.monotonic()
    done = torchrun(
        2,
        "tests.helpers.failing_train",
        *("train", config, "--run-dir", str(tmp_path / "run"), "parallel.data=2"),
    )
    assert done.returncode != 0
    assert "RuntimeError: a fault of rank 1 alone" in done.stderr
    assert time.monotonic() - start < 60 + 60  # a minute after the start of its processes


@forks
def test_a_wrong_number_of_processes_is_one_clear_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_on_ranks(2, run, str(write_tiny(tmp_path)), "parallel.data=3") == [2, 2]
    output = run.with_suffix(".out").read_text(encoding="utf-8")
    message = (
        "fastrl: error: `parallel` must have sizes that multiply to the number of processes, 2"
    )
    assert output.count(message) == 2
    assert "Traceback" not in output
