"""The command line of `benchmarks.frameworks`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks import liger, torchtitan, trl, verl
from benchmarks.frameworks.batch import RecordedBatch
from benchmarks.frameworks.rows import compared, unexplained
from benchmarks.measure import environment

FILE = Path(__file__).parent.parent / "results" / "frameworks.json"
# Their names as distributions.
FRAMEWORKS = {
    "TRL": ("trl", trl),
    "Liger": ("liger-kernel", liger),
    "verl": ("verl", verl),
    "torchtitan": ("torchtitan", torchtitan),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs every framework that is installed and writes the file."""
    parser = argparse.ArgumentParser(description="One batch through the losses of other projects.")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="names, comma-separated")
    parser.add_argument("--json", type=Path, default=FILE, help="where the results go")
    options = parser.parse_args(arguments)
    results = run(options.frameworks.split(","))
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    wrong = [f"{row['framework']} {row['theirs']}" for row in results["rows"] if unexplained(row)]
    if wrong:
        raise SystemExit("differ without a reason:\n" + "\n".join(wrong))


def run(names: Sequence[str]) -> dict[str, Any]:
    """The results of some frameworks."""
    recorded = RecordedBatch.load()
    found: list[dict[str, Any]] = []
    versions = {name: installed_version(FRAMEWORKS[name][0]) for name in names}
    for name, number in versions.items():
        if number is None:
            print(f"{name}: not run: {name} is not installed")
            continue
        rows = [compared(row, recorded) for row in FRAMEWORKS[name][1].all_rows()]
        differing = sum(bool(unexplained(row)) for row in rows)
        print(f"{name} {number}: {len(rows)} rows, {differing} differ without a reason")
        found += rows
    return {"versions": versions, **environment(), "rows": found}


def installed_version(distribution: str) -> str | None:
    """Of a distribution; None where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    torch.set_num_threads(1)  # the batch is small
    main()
