"""What makes others wait: ranks that hang, leave, or never come, and a torchrun that is gone."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from tests.faults.acts import never_return, send
from tests.faults.kinds import (
    IN_STEP,
    POINTS,
    Act,
    Case,
    Kind,
    at,
    ends_with,
    on_call,
    saved_before,
)
from tests.faults.places import Place

TIMEOUT = 5
"""Seconds of `parallel.timeout` where a rank hangs: well above a step, also on a busy machine."""


def _hangs(place: Place, act: Act, number: int, rank: int) -> None:
    place.timeout = TIMEOUT
    ended = place.train(at(IN_STEP[number % 3], number, act, rank=rank))
    ends_with(ended, ended.first, (1,), f"rank {ended.first} of {place.num_ranks} made no progress")
    assert "the innermost call last" in ended.err
    assert place.saved == saved_before("step", number)
    place.goes_on()


def hanging(act: Act) -> list[Case]:
    """A fault after which a rank does not go on, on two and on four ranks."""
    return [
        Case(num_ranks, partial(_hangs, act=act, number=number, rank=rank))
        for num_ranks, rank, number in ((2, 0, 2), (2, 1, 4), (4, 3, 5))
    ]


def _hangs_alone(place: Place, number: int) -> None:
    def act() -> None:
        parent = os.getpid()
        if os.fork() == 0:
            for _ in range(2):
                time.sleep(0.1)
                os.kill(parent, signal.SIGTERM)
            os._exit(0)
        never_return()

    ended = place.train(at("step", number, act))
    assert ended.codes == [143], ended.err
    assert place.saved == saved_before("step", number)
    place.goes_on()


def _leaves(place: Place, number: int, code: int) -> None:
    """A rank that is gone; with 0 nobody ends the others for it."""
    rank = place.num_ranks - 1
    ended = place.train(at("step", number, partial(os._exit, code), rank=rank))
    assert ended.codes[rank] == code, ended.codes
    assert all(ended.codes[:rank]), ended.codes
    assert place.saved == saved_before("step", number)
    place.goes_on()


def _never_joins(place: Place) -> None:
    place.timeout = TIMEOUT
    ended = place.train(lambda rank: os._exit(0) if rank == 1 else None)
    assert ended.codes[0] == 1, ended.codes
    assert f"rank 0 of 2 made no progress for {TIMEOUT} s" in ended.err
    assert not place.run.exists()
    place.goes_on()


def _loses_torchrun(place: Place, number: int) -> None:
    def prepare(rank: int) -> None:
        ours, theirs = os.pipe()
        if os.fork():
            os.read(ours, 1)
            send(signal.SIGKILL)
        os.environ["TORCHELASTIC_RUN_ID"] = "job"

        def act() -> None:
            os.write(theirs, b"x")
            never_return()

        on_call(*POINTS["step"], number, act)

    ended = place.train(prepare)
    assert ended.codes == [-signal.SIGKILL]
    assert place.saved == saved_before("step", number)
    place.goes_on()


AFTER = "the steps after the last checkpoint"

KINDS = [
    Kind(
        "a call of the only process that does not return, and SIGTERM twice",
        "143; the second one ends it",
        AFTER,
        [Case(1, partial(_hangs_alone, number=number)) for number in (2, 4, 6)],
    ),
    Kind(
        "a rank that leaves in the middle of a run, with exit code 0 or 3",
        "other than 0; the others do not wait for it",
        AFTER,
        [
            Case(ranks, partial(_leaves, number=number, code=code))
            for ranks in (2, 4)
            for number, code in ((2, 0), (5, 0), (4, 3))
        ],
    ),
    Kind(
        "a rank that never joins",
        "1 after `parallel.timeout`, with the stacks of the ranks that wait",
        "nothing",
        [Case(2, _never_joins)],
    ),
    Kind(
        "SIGKILL of torchrun",
        "its ranks are killed by the kernel, and write nothing after it",
        AFTER,
        [Case(1, partial(_loses_torchrun, number=number)) for number in (1, 2, 4, 6)],
    ),
]
