"""The tables of `benchmarks.frameworks`, from its results."""

from __future__ import annotations

from typing import Any

from benchmarks.frameworks import rows
from benchmarks.frameworks.batch import SPLITS
from benchmarks.frameworks.rows import TOLERANCE, Reason, in_words, worst

REASONS = [x for x in vars(rows).values() if isinstance(x, Reason)]


def sections(results: dict[str, Any]) -> str:
    """A heading, a table and the reasons of its differences for each framework."""
    return "\n".join(
        section(name, version, [row for row in results["rows"] if row["framework"] == name])
        for name, version in results["versions"].items()
    )


def section(name: str, version: str | None, results: list[dict[str, Any]]) -> str:
    """Of one framework."""
    title = f"#### {name}"
    if version is None:
        return f"{title}\n\nNot run: {name} is not installed.\n"
    lines = [["theirs", "fastrl", "loss", *SPLITS, "why"]]
    lines += [line(row) for row in results]
    table = "".join(
        f"| {' | '.join(cells)} |\n" for cells in [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    )
    return f"{title} {version}\n\n{table}{reasons(results)}"


def line(row: dict[str, Any]) -> list[str]:
    """Its cells."""
    config, splits = row["config"], row["splits"]
    theirs = f"`{row['theirs']}`"
    if config is None:
        return [theirs, "", "", *["" for _ in SPLITS], row["reason"]]
    loss = next(iter(splits.values()))["loss_fastrl"]
    cells = [cell(splits.get(name)) for name in SPLITS]
    return [
        theirs,
        f"`{in_words(config, rows.CLIP, rows.NARROW)}`",
        f"{loss:.6f}",
        *cells,
        row["reason"] or "",
    ]


def cell(result: dict[str, float] | None) -> str:
    """The larger error, and what is left of it once the reason is in fastrl's loss."""
    if result is None:
        return ""
    if worst(result) <= TOLERANCE:
        return f"{worst(result):.0e}"
    return f"**{worst(result):.2g}** ({worst(result, 'explained_'):.0e})"


def reasons(results: list[dict[str, Any]]) -> str:
    """What the last column says, in full."""
    named = [row["reason"] for row in results]
    found = [reason for reason in REASONS if reason.name in named]
    return (
        "".join(["\n", *(f"- *{reason.name}*: {reason.text}.\n" for reason in found)])
        if found
        else ""
    )
