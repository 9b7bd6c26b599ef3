"""What happens to the files of a run while it trains: kills, errors, a full disk, removals."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial

from fastrl.training.run_folder import RunFolder
from tests.faults.kinds import (
    IN_STEP,
    Case,
    Kind,
    at,
    ends_with,
    fail_file_operation,
    on_call,
    places_in_a_run,
    saved_before,
)
from tests.faults.places import CHECKPOINTS, Place

OPERATIONS = 64
"""Injections over the file operations of a run, and the operations that it has at least."""

FSYNCS = 24


def _killed(place: Place, number: int) -> None:
    def kill(event: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    ended = place.train(
        lambda rank: None if rank else fail_file_operation(str(place.run), number, kill)
    )
    ends_with(ended, 0, (-signal.SIGKILL,))
    place.goes_on()


def _operation_fails(place: Place, number: int, code: int) -> None:
    def fail(event: str) -> None:
        raise OSError(code, os.strerror(code))

    ended = place.train(lambda rank: fail_file_operation(str(place.run), number, fail))
    if ended.codes == [0]:  # it was a removal, which the next checkpoint repeats
        place.is_whole()
    else:
        place.is_refused(ended, os.strerror(code))
        place.goes_on()


def _fsync_fails(place: Place, number: int) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ended = place.train(lambda rank: on_call(os, "fsync", number, fail))
    place.is_refused(ended, os.strerror(errno.EIO))
    assert place.saved in CHECKPOINTS[:-1]
    place.goes_on()


def _disk_is_full(place: Place, kib: float) -> None:
    """As where no file can become longer than a bound; a longer write is cut there."""
    most = int(kib * 1024)

    def prepare(rank: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    ended = place.train(prepare)
    place.is_refused(ended, os.strerror(errno.EFBIG))
    place.goes_on()


def _no_more_handles(place: Place, number: int, point: str) -> None:
    def act() -> None:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used - 2, used))

    ended = place.train(at(point, number, act))
    place.is_refused(ended, os.strerror(errno.EMFILE))
    assert place.saved == saved_before(point, number)
    place.goes_on()


def _removed(place: Place, point: str, number: int) -> None:
    ended = place.train(at(point, number, partial(shutil.rmtree, place.run)))
    _is_gone(place, ended.codes, ended.err)
    ended = place.train()
    assert ended.codes == [0] * place.num_ranks
    place.is_whole()


def _is_gone(place: Place, codes: list[int], err: str) -> None:
    assert codes[0] == 2, (codes, err)
    assert "fastrl: error: " in err
    if place.num_ranks == 1:
        assert "Traceback" not in err
    assert not place.run.exists()


def _moved(place: Place, point: str, number: int) -> None:
    elsewhere = place.folder / "elsewhere"
    ended = place.train(at(point, number, lambda: place.run.rename(elsewhere)))
    _is_gone(place, ended.codes, ended.err)
    elsewhere.rename(place.run)
    place.goes_on()


def _log_removed(place: Place, name: str, number: int) -> None:
    ended = place.train(at("step", number, (place.run / name).unlink))
    place.is_refused(ended, f"{place.run / name}: must stay in its place")
    assert not (place.run / name).exists()
    assert place.saved == saved_before("step", number)


def _is_locked(place: Place, resume: bool) -> None:
    if resume:
        place.take_stopped_run()
    with RunFolder(place.run, writes=True):
        before = _contents(place)
        ended = place.train(resume=resume)
        place.is_refused(ended, f"{place.run}: must be used by one process at a time")
        assert re.search(rf"in use by process {os.getpid()} on host \S+;", ended.err)
        assert _contents(place) == before
    place.goes_on()


def _contents(place: Place) -> dict[str, bytes]:
    files = (path for path in place.run.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


def _two_at_once(place: Place, number: int) -> None:
    """A second process resumes while the first trains."""
    codes = place.folder / "code"

    def act() -> None:
        pid = os.fork()
        if pid == 0:
            from fastrl.cli import main

            code = 1
            try:
                arguments = ["--run-dir", str(place.run), "--resume"]
                code = main(["train", str(place.config), *arguments])
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        codes.write_text(str(code), encoding="utf-8")

    ended = place.train(at("step", number, act))
    assert ended.codes == [0], ended.err
    assert codes.read_text("utf-8") == "2"
    assert "must be used by one process at a time" in ended.err
    place.is_whole()


def _everywhere(flow: Callable[..., None]) -> list[Case]:
    places = places_in_a_run((*IN_STEP, "record", "checkpoint", "manifest"))[::3]
    cases = [Case(1, partial(flow, point=point, number=number)) for point, number in places]
    return [*cases, *(Case(ranks, partial(flow, point="step", number=4)) for ranks in (2, 4))]


ENDS = "2 and one message"
AFTER = "the steps after the last checkpoint"

KINDS = [
    Kind(
        "SIGKILL before a file operation, at each",
        "killed; nothing is half-written under its name",
        AFTER,
        [
            Case(ranks, partial(_killed, number=number))
            for ranks, numbers in ((1, range(1, OPERATIONS + 1)), (2, range(5, OPERATIONS, 15)))
            for number in numbers
        ],
    ),
    Kind(
        "an input/output error of a file operation",
        f"{ENDS}, or 0 where nothing was to be removed",
        AFTER,
        [
            Case(1, partial(_operation_fails, number=number, code=errno.EIO))
            for number in range(1, OPERATIONS + 1, 2)
        ],
    ),
    Kind(
        "no permission for a file operation",
        f"{ENDS}, or 0 where nothing was to be removed",
        AFTER,
        [
            Case(1, partial(_operation_fails, number=number, code=errno.EACCES))
            for number in range(2, OPERATIONS + 1, 4)
        ],
    ),
    Kind(
        "fsync fails",
        f"{ENDS}; the checkpoint does not appear",
        AFTER,
        [Case(1, partial(_fsync_fails, number=number)) for number in range(1, FSYNCS, 2)],
    ),
    Kind(
        "the disk is full while a checkpoint is written",
        f"{ENDS}; the checkpoint does not appear",
        AFTER,
        [Case(1, partial(_disk_is_full, kib=kib)) for kib in (10, 12, 16, 20, 24, 28)],
    ),
    Kind(
        "the disk is full while a log is written, whose last line is cut",
        ENDS,
        AFTER,
        [Case(1, partial(_disk_is_full, kib=kib)) for kib in (1.1, 1.3, 2.7, 2.9)],
    ),
    Kind(
        "no more file handles",
        ENDS,
        AFTER,
        [Case(1, partial(_no_more_handles, number=n, point="checkpoint")) for n in (1, 2, 3, 4)],
    ),
    Kind(
        "the run folder is removed",
        f"{ENDS}; it is not made anew",
        "the run: it was removed",
        _everywhere(_removed),
    ),
    Kind(
        "the run folder is moved away",
        f"{ENDS}; nothing is made in its place",
        AFTER,
        _everywhere(_moved),
    ),
    Kind(
        "a log is removed",
        f"{ENDS}; it is not made anew",
        "the log: it was removed",
        [Case(1, partial(_log_removed, name="metrics.jsonl", number=n)) for n in range(1, 7)],
    ),
    Kind(
        "another process holds the run folder",
        f"{ENDS}, which names the process; nothing is written",
        "nothing",
        [Case(1, partial(_is_locked, resume=resume)) for resume in (False, True)],
    ),
    Kind(
        "a second process is started on the folder of a running one",
        "2 of the second one; the first one ends with 0",
        "nothing",
        [Case(1, partial(_two_at_once, number=n)) for n in (3, 4, 5)],
    ),
]
