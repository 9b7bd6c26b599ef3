"""A selection of the faults, and the table of them all."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.injections import inject_all
from tests.faults.kinds import Kind
from tests.faults.table import BEGIN, END, KINDS, table

PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"

# Kinds whose one case takes long, and what other tests do.
LEFT_OUT = ("SIGSTOP of a rank", "does not return", "never joins", "scoring", "run folder")


def _selection() -> Iterator[Kind]:
    """A case of each kind, on one rank or on two in turn."""
    for number, kind in enumerate(KINDS):
        if any(words in kind.name for words in LEFT_OUT):
            continue
        on_two = [case for case in kind.cases if case.num_ranks == 2] if number % 8 == 0 else []
        cases = on_two or kind.cases
        yield Kind(kind.name, kind.outcome, kind.lost, [cases[number % len(cases)]])


def test_a_fault_of_each_kind_is_as_stated() -> None:
    # Tests before this one may have left a process, which is not the job's.
    with subprocess.Popen(["sleep", "300"]) as foreign:
        try:
            results = list(inject_all(list(_selection()), 2))
        finally:
            foreign.kill()
    errors = [result.error for result in results if result.error]
    assert not errors, "\n".join(errors)


def test_the_table_is_of_all_kinds() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table()
    names = [kind.name for kind in KINDS]
    assert len(names) == len(set(names)) >= 40
    assert sum(len(kind.cases) for kind in KINDS) >= 500


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_faults_are_injected_on_several_ranks(ranks: int) -> None:
    assert sum(case.num_ranks == ranks for kind in KINDS for case in kind.cases) > 40
