"""A run that is killed at any file operation goes on as if nothing had been: no line is missing.

Here at some; `python -m tests.faults` kills a smaller run at each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastrl.cli import main
from tests.helpers.killed_runs import (
    KILLED,
    check_same,
    count_operations,
    forks,
    score_here,
    train_in_child,
)
from tests.helpers.runs import FEW_STEPS, write_tiny

pytestmark = forks


@dataclass
class Whole:
    """A run that was never stopped."""

    folder: Path
    arguments: list[str]
    num_operations: int


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("whole")
    # In the background another thread does some of it, at no fixed place.
    arguments = [str(write_tiny(folder)), *FEW_STEPS, "checkpoint.asynchronous=false"]
    with pytest.MonkeyPatch.context() as patch:
        score_here(patch)
        # In this process, so that its children have what it imported.
        assert main(["train", *arguments, "--run-dir", str(folder / "run")]) == 0
        yield Whole(folder / "run", arguments, count_operations(folder / "counted", *arguments))


def _kill_and_resume(tmp_path: Path, whole: Whole, place: int) -> None:
    run = tmp_path / f"run-{place}"
    assert train_in_child(run, *whole.arguments, kill_at=place) == KILLED
    _resume(run, whole)


def _resume(run: Path, whole: Whole) -> None:
    code = train_in_child(run, *whole.arguments, "--resume")
    out = run.with_suffix(".out").read_text(encoding="utf-8")
    assert code == 0, out
    # Killed when it was finished, while it removed the checkpoint before, it is left as it is.
    check_same(run, whole.folder, may_have_more="nothing to do" in out)


def _places(whole: Whole, number: int) -> list[int]:
    """Operations spread over the run, one at random in each of equal parts."""
    drawn, size = random.Random(0), whole.num_operations / number
    return [int(size * (part + drawn.random())) for part in range(number)]


def test_rl14_a_run_killed_at_some_file_operations_resumes(tmp_path: Path, whole: Whole) -> None:
    for place in [0, 1, *_places(whole, 10)]:
        _kill_and_resume(tmp_path, whole, place)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rl14_a_run_killed_again_and_again_resumes(tmp_path: Path, whole: Whole, seed: int) -> None:
    drawn, run = random.Random(seed), tmp_path / "run"
    for _ in range(8):
        place = drawn.randrange(whole.num_operations // 2)
        if train_in_child(run, *whole.arguments, "--resume", kill_at=place) == 0:
            break
    _resume(run, whole)
