"""What happens to a process: exceptions, signals, crashes, hangs; first NVIDIA's twelve."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from tests.faults.acts import (
    hold_the_interpreter,
    never_return,
    raise_device_error,
    raise_error,
    raise_from_a_handler,
    raise_from_a_thread,
    segfault,
    send,
    send_sigterm,
)
from tests.faults.hang_kinds import hanging
from tests.faults.jobs import Ended
from tests.faults.kinds import (
    IN_STEP,
    POINTS,
    Act,
    Case,
    Kind,
    at,
    ends_with,
    loses_to_checkpoint,
    on_call,
    saved_before,
    spread,
    step_at,
)
from tests.faults.places import CHECKPOINTS, STEPS, Place

WRITING = ("record", "checkpoint", "manifest", "latest")


def _ends(act: Act, *codes: int, message: str = "") -> list[Case]:
    points = (*IN_STEP, "checkpoint")
    flow = partial(loses_to_checkpoint, act=act, codes=codes, message=message)
    return spread(flow, points, every=2)


def _saves(
    place: Place, numbers: tuple[signal.Signals, ...], point: str, number: int, rank: int
) -> None:
    """A signal after which the step is finished and saved, on all ranks."""
    ended = place.train(at(point, number, partial(send, *numbers), rank=rank))
    step = step_at(point, number)
    if step == STEPS:  # the run ends by itself
        assert ended.codes == [0] * place.num_ranks, ended.err
        place.is_whole()
        return
    assert_stopped(ended, 128 + numbers[0])
    assert f"stopped after step {step} and saved; go on with --resume" in ended.out, ended.out
    assert place.saved == step
    place.goes_on()


def assert_stopped(ended: Ended, code: int) -> None:
    """All ranks have saved; the others may meet the supervisor's SIGTERM when they leave."""
    assert ended.codes[ended.first] == code, (ended.codes, ended.err)
    assert set(ended.codes) <= {code, -signal.SIGTERM}, (ended.codes, ended.err)
    assert not ended.err, ended.err


def _all_ranks_at_once(place: Place, number: int) -> None:
    ended = place.train(lambda rank: on_call(*POINTS["step"], number, send_sigterm))
    assert_stopped(ended, 143)
    assert place.saved == number
    place.goes_on()


def _before_the_first_step(place: Place, sent: signal.Signals, codes: tuple[int, ...]) -> None:
    from fastrl.training import run

    ended = place.train(lambda rank: on_call(run, "build_sources", 1, partial(send, sent)))
    ends_with(ended, 0, codes)
    assert not place.run.exists()
    place.goes_on()


def _twice(place: Place, point: str, number: int, rank: int) -> None:
    act = partial(send, signal.SIGTERM, signal.SIGTERM)
    ended = place.train(at(point, number, act, rank=rank))
    ends_with(ended, rank, (143,), "fastrl: interrupted")
    assert place.saved == saved_before(point, number)
    place.goes_on()


def _killed_in_the_background(place: Place, point: str, number: int) -> None:
    """Killed by the thread that writes, at any step of the run, which has gone on."""
    act = partial(send, signal.SIGKILL)
    ended = place.train(at(point, number, act), "checkpoint.asynchronous=true")
    ends_with(ended, 0, (-9,))
    assert place.saved == saved_before(point, number)
    place.goes_on("checkpoint.asynchronous=true")


def _is_nothing(place: Place, act: Act, point: str, number: int, rank: int) -> None:
    """Something that a run outlasts."""
    ended = place.train(at(point, number, act, rank=rank))
    assert ended.codes == [0] * place.num_ranks, ended.err
    place.is_whole()


AFTER = "the steps after the last checkpoint"
ENDS = "the job ends at once"

NVIDIA = [
    Kind(
        "an exception",
        f"1 with its traceback; {ENDS}",
        AFTER,
        _ends(raise_error, 1, message="InjectedError"),
    ),
    Kind(
        "an exception that another thread raises in this one",
        f"1 with its traceback; {ENDS}",
        AFTER,
        _ends(raise_from_a_thread, 1, message="InjectedError"),
    ),
    Kind(
        "an exception from a handler of a signal",
        f"1 with its traceback; {ENDS}",
        AFTER,
        _ends(raise_from_a_handler, 1, message="InjectedError"),
    ),
    Kind(
        "SIGINT (Ctrl-C)",
        "130; all ranks finish the step and save",
        "nothing",
        spread(partial(_saves, numbers=(signal.SIGINT,)), (*IN_STEP, *WRITING), every=2),
    ),
    Kind(
        "SIGTERM",
        "143; all ranks finish the step and save",
        "nothing",
        spread(partial(_saves, numbers=(signal.SIGTERM,)), (*IN_STEP, *WRITING))
        + [Case(ranks, partial(_all_ranks_at_once, number=4)) for ranks in (1, 2, 4)],
    ),
    Kind("SIGKILL", f"killed; {ENDS}", AFTER, _ends(partial(send, signal.SIGKILL), -9)),
    Kind(
        "SIGSTOP of a rank",
        "1 after `parallel.timeout`, with the stacks of the ranks that wait",
        AFTER,
        hanging(partial(send, signal.SIGSTOP)),
    ),
    Kind("an abort", f"SIGABRT; {ENDS}", AFTER, _ends(os.abort, -6)),
    Kind("a segmentation fault", f"SIGSEGV; {ENDS}", AFTER, _ends(segfault, -11)),
    Kind(
        "a call on a rank that holds the interpreter and does not return",
        "1 after `parallel.timeout`, with the stacks of the ranks that wait",
        AFTER,
        hanging(partial(hold_the_interpreter, 60)),
    ),
    Kind(
        "an error of the device, as torch raises it (here an index out of range on the CPU)",
        f"1 with its traceback; {ENDS}",
        AFTER,
        _ends(raise_device_error, 1, message="IndexError"),
    ),
    Kind(
        "a call on a rank that does not return, as of a device that hangs (here a sleep)",
        "1 after `parallel.timeout`, with the stacks of all ranks",
        AFTER,
        hanging(never_return),
    ),
]

KINDS = [
    *NVIDIA,
    Kind(
        "SIGHUP",
        "129; all ranks finish the step and save",
        "nothing",
        spread(partial(_saves, numbers=(signal.SIGHUP,)), (*IN_STEP, *WRITING), every=3),
    ),
    Kind("SIGTERM twice", f"143; {ENDS}", AFTER, spread(_twice, (*IN_STEP, "record"), ())),
    Kind(
        "SIGINT, SIGTERM or SIGHUP before the first step",
        "130, or ended by the signal; nothing has been written",
        "nothing",
        [
            Case(ranks, partial(_before_the_first_step, sent=sent, codes=codes))
            for ranks in (1, 2)
            for sent, codes in (
                (signal.SIGINT, (130,)),
                (signal.SIGTERM, (-15,)),
                (signal.SIGHUP, (-1,)),
            )
        ],
    ),
    Kind(
        "SIGSTOP of the only process, and SIGCONT",
        "0; the run goes on",
        "nothing",
        spread(partial(_is_nothing, act=partial(send, signal.SIGSTOP)), ("step", "record"), ()),
    ),
    Kind(
        "a rank that is late",
        "0; the others wait",
        "nothing",
        spread(partial(_is_nothing, act=partial(time.sleep, 0.2)), ("update",)),
    ),
    Kind(
        "a call that holds the interpreter for a while",
        "0; the others wait",
        "nothing",
        spread(partial(_is_nothing, act=partial(hold_the_interpreter, 18)), ("update",)),
    ),
    Kind(
        "SIGKILL while a checkpoint is written in the background",
        f"killed; {ENDS}",
        "the steps after the last complete checkpoint",
        [
            Case(1, partial(_killed_in_the_background, point=point, number=number))
            for point in ("manifest", "latest")
            for number in range(1, len(CHECKPOINTS))
        ],
    ),
    Kind("os._exit(3)", f"3; {ENDS}", AFTER, _ends(partial(os._exit, 3), 3)),
]
