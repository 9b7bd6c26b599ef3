"""Writes the tables of measurements between markers, from benchmarks/results.

    python -m benchmarks.table README.md docs/performance.md

A file says where with `<!-- benchmark NAME -->` and `<!-- end -->`, where NAME is a file of
benchmarks/results without its ending. With `--check` nothing is written, and a table that does not
say what the files say is an error.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MARKED = re.compile(r"(<!-- benchmark ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for file in options.files:
        text = file.read_text()
        updated = with_tables(text)
        if options.check and updated != text:
            raise SystemExit(f"{file}: a table differs; run `python -m benchmarks.table {file}`")
        if not options.check:
            file.write_text(updated)


def with_tables(text: str) -> str:
    """The text with every marked table made anew."""
    return MARKED.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def table(name: str) -> str:
    """The table of a file of results."""
    path = RESULTS / f"{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    parts = [describe(rows[0], path.name)]
    for passes, title in (
        ("fwdbwd", "Loss, forward and backward"),
        ("fwd", "Log-probabilities and entropy, no gradient"),
    ):
        chosen = [row for row in rows if row["passes"] == passes]
        if chosen:
            parts.append(f"{title}:\n\n" + passes_table(chosen, passes))
    return "\n".join(parts)


def describe(row: dict[str, Any], file: str) -> str:
    """One sentence: what was measured on what."""
    tokens, hidden, vocabulary = row["shape"]
    softcap = f", softcap {row['softcap']:g}" if row["softcap"] else ""
    return (
        f"{row['shape_name']}: T={tokens} D={hidden} V={vocabulary}{softcap}, {row['dtype']};"
        f" {row['rows_labelled']} rows labelled, {row['rows_active']} with gradient."
        f" {row['gpu']}, torch {row['torch']}, Triton {row['triton']}, commit"
        f" {row['commit'][:7]}{' and changes' if row['dirty'] else ''}"
        f" (`benchmarks/results/{file}`).\n"
    )


def passes_table(rows: list[dict[str, Any]], passes: str) -> str:
    """Rows by time; those that did not run last, with the reason."""
    first = rows[0]
    base, base_name = first["floor_active_ms"], "3 products, rows with gradient"
    errors = [("error_grad_hidden", "error of dh"), ("error_grad_weight", "error of dW")]
    if passes == "fwd":
        base, base_name = first["floor_labelled_ms"], "1 product, labelled rows"
        errors = [("error_logprobs", "mean error of log-prob")]
    header = ["implementation", "ms", f"x floor ({base_name}, {base:.1f} ms)", "peak GiB"]
    header += [title for _, title in errors]
    lines = [header, ["---"] * len(header)]
    timed = sorted((row for row in rows if "time_ms" in row), key=lambda row: row["time_ms"])
    for row in timed:
        peak = row["peak_bytes_over_inputs"]
        cells = [
            f"{row['implementation']} ({row['strategy']})",
            f"{row['time_ms']:.1f}",
            f"{row['time_ms'] / base:.2f}",
            "" if peak is None else f"{peak / 2**30:.2f}",
        ]
        lines.append([*cells, *(number(row.get(key)) for key, _ in errors)])
    missing = [row for row in rows if "time_ms" not in row]
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    reasons = "".join(f"\n- {row['implementation']}: {row.get('reason')}" for row in missing)
    return body + (f"\nNot run:\n{reasons}\n" if missing else "")


def number(value: float | None) -> str:
    """Two digits, or nothing."""
    return "" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    main()
