"""All kinds of faults, and the table of docs/reliability.md."""

from __future__ import annotations

from pathlib import Path

from tests.faults import (
    checkpoint_kinds,
    file_kinds,
    hang_kinds,
    input_kinds,
    number_kinds,
    process_kinds,
    scoring_kinds,
)
from tests.faults.kinds import Kind

KINDS: list[Kind] = [
    *process_kinds.KINDS,
    *hang_kinds.KINDS,
    *file_kinds.KINDS,
    *checkpoint_kinds.KINDS,
    *input_kinds.KINDS,
    *number_kinds.KINDS,
    *scoring_kinds.KINDS,
]

RANKS = (1, 2, 4)
BEGIN, END = "<!-- made by python -m tests.faults -->", "<!-- end -->"


def table() -> str:
    """The table in Markdown: a row for each kind, in which all injections are as stated."""
    lines = [
        "| fault | injected on 1, 2, 4 ranks | what the run does, exit code first | what is lost |",
        "| --- | --- | --- | --- |",
    ]
    for kind in KINDS:
        counts = [sum(case.num_ranks == ranks for case in kind.cases) for ranks in RANKS]
        shown = ", ".join(map(str, counts))
        lines.append(f"| {kind.name} | {shown} | {kind.outcome} | {kind.lost} |")
    total = sum(len(kind.cases) for kind in KINDS)
    by_ranks = [
        sum(case.num_ranks == ranks for kind in KINDS for case in kind.cases) for ranks in RANKS
    ]
    shown = ", ".join(map(str, by_ranks))
    lines.append(f"| {len(KINDS)} kinds | {shown}: {total:,} | all as stated | |")
    return "\n".join(lines)


def write_table(page: Path) -> None:
    """Puts the table between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")
