"""Injections, some at a time, by processes that are forked from one with torch loaded."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastrl.training import run as _loads_torch  # noqa: F401
from tests.faults.acts import send_sigterm
from tests.faults.kinds import Kind, at
from tests.faults.places import STOPPED, Place, Shared

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Injection:
    """What came of a case.

    Attributes:
        kind: index of its kind.
        label: of the case.
        seconds: that it took.
        error: traceback of what was not as stated; empty if all was.
    """

    kind: int
    label: str
    seconds: float
    error: str


def _make(folder: str, ranks: Sequence[int]) -> Shared:
    """What injections on these numbers of ranks need."""
    shared = Shared(Path(folder))
    shared.make(ranks, at("step", STOPPED, send_sigterm))
    return shared


def inject(kinds: Sequence[Kind], shared: Shared, kind: int, case: int) -> Injection:
    """Injects one case, in a folder of its own."""
    chosen = kinds[kind].cases[case]
    folder = shared.folder / f"{kind}-{case}"
    begin, error = time.monotonic(), ""
    try:
        chosen.inject(Place(folder, chosen.num_ranks, shared))
    except Exception:
        error = traceback.format_exc()
    shutil.rmtree(folder, ignore_errors=True)
    label = f"{kinds[kind].name} [{chosen.num_ranks} ranks] {chosen.inject}"
    return Injection(kind, label, time.monotonic() - begin, error)


def _inject(task: tuple[int, int]) -> Injection:
    assert _kinds_and_folder is not None
    return inject(*_kinds_and_folder, *task)


_kinds_and_folder: tuple[Sequence[Kind], Shared] | None = None
"""What the forked processes find; functions that inject cannot be pickled."""


def inject_all(kinds: Sequence[Kind], processes: int) -> Iterator[Injection]:
    """Injects all cases of some kinds, in memory where there is such a disk.

    Every job is supervised from a forked process, which has no children but the job's: those of
    this one, which may be a test process that has run others, are not seen there.
    """
    global _kinds_and_folder
    tasks = [(number, case) for number, kind in enumerate(kinds) for case in range(len(kind.cases))]
    ranks = {kinds[number].cases[case].num_ranks for number, case in tasks} | {1}
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=parent) as folder:
        with fork.Pool(1) as pool:
            shared = pool.apply(_make, (folder, sorted(ranks)))
        _kinds_and_folder = kinds, shared
        with fork.Pool(processes) as pool:
            yield from pool.imap_unordered(_inject, tasks)
