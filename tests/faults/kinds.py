"""What a kind of fault is, and the places of a run at which faults happen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastrl.training import checkpoint, phases
from fastrl.training.log_files import MetricsWriter
from fastrl.training.phases import Phase
from fastrl.training.saving import CheckpointSaver
from tests.faults.jobs import Ended, Prepare
from tests.faults.places import CHECKPOINTS, STEPS, Place

Act = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One injection.

    Attributes:
        num_ranks: of the job.
        inject: injects the fault, and asserts that all is as stated.
    """

    num_ranks: int
    inject: Callable[[Place], None]


@dataclass(frozen=True)
class Kind:
    """A kind of fault, a row of the table.

    Attributes:
        name: what happens to the run.
        outcome: what the run does, exit code first.
        lost: what is lost once it has gone on.
        cases: injections.
    """

    name: str
    outcome: str
    lost: str
    cases: Sequence[Case]


POINTS: dict[str, tuple[Any, str]] = {
    "step": (Phase, "step"),
    "backward": (Phase, "_backward"),
    "update": (phases, "apply_update"),
    "record": (MetricsWriter, "log"),
    "checkpoint": (CheckpointSaver, "save"),
    "manifest": (checkpoint, "write_manifest"),
    "latest": (checkpoint, "_write_latest"),
}
"""Functions by what they do; a fault happens when one is called for the n-th time, from 1. Those
from `record` on write, on rank 0 alone (but for `checkpoint`)."""

IN_STEP = ("step", "backward", "update")


def at(point: str, number: int, act: Act, *, rank: int = 0) -> Prepare:
    """A fault at the n-th call of a point, on one rank."""

    def prepare(this: int) -> None:
        if this == rank:
            on_call(*POINTS[point], number, act)

    return prepare


def on_call(owner: Any, name: str, number: int, act: Act) -> None:
    """Acts at the n-th call of a function, from 1, before it does anything."""
    function = getattr(owner, name)
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return function(*arguments, **options)

    setattr(owner, name, counted)


def saved_before(point: str, number: int) -> int:
    """The step of the last checkpoint when a point is reached for the n-th time."""
    if point in (*IN_STEP, "record"):
        return max(step for step in CHECKPOINTS if step < number)
    return CHECKPOINTS[number - 1]


def step_at(point: str, number: int) -> int:
    """The step in which, or after which, a point is reached for the n-th time."""
    return number if point in (*IN_STEP, "record") else CHECKPOINTS[number]


def places_in_a_run(points: Sequence[str]) -> list[tuple[str, int]]:
    """The times at which points are reached."""
    lasts = [STEPS if point in (*IN_STEP, "record") else len(CHECKPOINTS) - 1 for point in points]
    return [
        (point, number)
        for point, last in zip(points, lasts, strict=True)
        for number in range(1, last + 1)
    ]


def loses_to_checkpoint(
    place: Place,
    act: Act,
    point: str,
    number: int,
    rank: int,
    *,
    codes: Sequence[int],
    message: str = "",
) -> None:
    """A fault that ends the job: the checkpoint before is left, and the run goes on from it."""
    ended = place.train(at(point, number, act, rank=rank))
    ends_with(ended, rank, codes, message)
    assert place.saved == saved_before(point, number), place.saved
    place.goes_on()


def ends_with(ended: Ended, rank: int, codes: Sequence[int], message: str = "") -> None:
    assert ended.codes[rank] in codes, (ended.codes, ended.err)
    assert all(ended.codes), ended.codes
    assert message in ended.err, ended.err
    if 2 in codes:
        assert "Traceback" not in ended.err, ended.err


def spread(
    flow: Callable[..., None],
    points: Sequence[str],
    ranks: Sequence[int] = (2, 4),
    *,
    every: int = 1,
    **options: Any,
) -> list[Case]:
    """A flow at places of a run of one rank, and at a few of runs of several.

    Args:
        flow: called with the place, `point`, `number` and `rank`.
        points: names of `POINTS`.
        ranks: numbers of ranks of the other runs.
        every: number of places from one to the next; 1 for each.
        options: passed on.
    """
    cases = [
        Case(1, partial(flow, point=point, number=number, rank=0, **options))
        for point, number in places_in_a_run(points)[::every]
    ]
    for num_ranks in ranks:
        for rank, number in ((0, 2), (num_ranks - 1, 3), (num_ranks - 1, 5)):
            point = IN_STEP[number % 3]
            case = partial(flow, point=point, number=number, rank=rank, **options)
            cases.append(Case(num_ranks, case))
    return cases


def fail_file_operation(folder: str, number: int, act: Callable[[str], None]) -> None:
    """Acts before the n-th operation on a file below a folder, from 1, as Python audits them."""
    operations = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if event == "open" or event.startswith(("os.", "shutil.")):
            is_below = any(
                str(argument).startswith(folder)
                for argument in arguments
                if isinstance(argument, str) or hasattr(argument, "__fspath__")
            )
            if is_below:
                operations += 1
                if operations == number:
                    act(event)

    sys.addaudithook(watch)
