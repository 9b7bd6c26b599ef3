"""A run goes on over any number of processes and any split, by torchrun's restart as well."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastrl.cli import main
from tests.helpers.killed_runs import forks, lines, score_here, train_on_ranks
from tests.helpers.runs import FEW_STEPS, final_weights, write_tiny
from tests.helpers.torchrun import torchrun

ARGUMENTS = [*FEW_STEPS, "phases.1.losses.policy.type=gspo", "checkpoint.keep=9"]
SPLITS = {
    "fsdp2": ["parallel.data=2", "parallel.fully_sharded=true"],
    "stp2": ["parallel.tensor=2", "parallel.sequence_parallel=true"],
    "sdp2_ms2": ["parallel.sequence_data=2", "parallel.micro_sequences=2"],
    "one": [],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run on one process that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = [str(write_tiny(folder)), "--run-dir", str(folder / "run"), *ARGUMENTS]
    with pytest.MonkeyPatch.context() as patch:
        score_here(patch)
        assert main(["train", *arguments]) == 0
        yield folder / "run"


def _check_close(run: Path, whole: Path) -> None:
    found, wanted = (lines(folder / "metrics.jsonl") for folder in (run, whole))
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.pop("phase") == expected.pop("phase")
        for record in (actual, expected):  # the head chooses it by what is split over ranks
            record.pop("single_pass", None)
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-9)
    weights, expected_weights = final_weights(run), final_weights(whole)
    assert weights.keys() == expected_weights.keys()
    for key, weight in expected_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-6, atol=1e-8)


@forks
@pytest.mark.parametrize(
    "splits",
    [("fsdp2", "stp2", "one"), ("sdp2_ms2", "one", "fsdp2")],
    ids=lambda names: "-".join(names),
)
def test_rl14_a_run_goes_on_over_other_processes(
    tmp_path: Path, whole: Path, splits: tuple[str, ...]
) -> None:
    run, config = tmp_path / "run", str(write_tiny(tmp_path))
    shutil.copytree(whole, run)
    stops = ("supervised-000001", "supervised-000002", "rl-000003")
    for name, checkpoint in zip(splits, stops, strict=True):
        (run / "checkpoints" / "latest").write_text(checkpoint, encoding="utf-8")
        size = 1 if name == "one" else 2
        codes = train_on_ranks(size, run, config, *ARGUMENTS, *SPLITS[name])
        assert codes == [0] * size, run.with_suffix(".out").read_text(encoding="utf-8")
        _check_close(run, whole)


@forks
def test_rl14_all_ranks_refuse_what_the_first_one_does(tmp_path: Path, whole: Path) -> None:
    run, config = tmp_path / "run", str(write_tiny(tmp_path))
    shutil.copytree(whole, run)
    weights = run / "checkpoints" / "rl-000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert train_on_ranks(2, run, config, *ARGUMENTS, *SPLITS["fsdp2"]) == [2, 2]
    out = run.with_suffix(".out").read_text(encoding="utf-8")
    assert out.count("model.safetensors: must have ") == 2
    assert out.count("Traceback") == 0
    shutil.copytree(whole, run, dirs_exist_ok=True)
    assert train_on_ranks(2, run, config, *ARGUMENTS, *SPLITS["fsdp2"]) == [0, 0]
    assert run.with_suffix(".out").read_text(encoding="utf-8").count("nothing to do") == 1


@pytest.mark.slow
def test_rl14_torchrun_starts_again_and_the_run_goes_on(tmp_path: Path, whole: Path) -> None:
    run, config = tmp_path / "run", str(write_tiny(tmp_path))
    arguments = ["train", config, "--run-dir", str(run), "--resume", *ARGUMENTS, "parallel.data=2"]
    done = torchrun(2, "tests.helpers.killed_once", *arguments, max_restarts=2)
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: " in done.stderr  # of the rank that was killed, or of the other
    _check_close(run, whole)
