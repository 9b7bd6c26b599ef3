"""`python -m tests.faults` injects every fault, and fails if one outcome is not as stated.

python -m tests.faults [--write docs/reliability.md] [--only WORDS] [--processes N]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.faults.injections import inject_all
from tests.faults.table import KINDS, write_table


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page to put the table into")
    parser.add_argument("--only", default="", metavar="WORDS", help="kinds with these words alone")
    parser.add_argument(
        "--processes", type=int, default=4, metavar="N", help="injections at a time; many wait"
    )
    arguments = parser.parse_args()
    begin = time.monotonic()
    kinds = [kind for kind in KINDS if arguments.only in kind.name]
    seconds = [0.0] * len(kinds)
    failures = 0
    for result in inject_all(kinds, arguments.processes):
        seconds[result.kind] += result.seconds
        if result.error:
            failures += 1
            print(f"NOT AS STATED: {result.label}\n{result.error}", flush=True)
    for kind, time_of_kind in zip(kinds, seconds, strict=True):
        print(f"{len(kind.cases):4} in {time_of_kind:6.1f} s  {kind.name}")
    total = sum(len(kind.cases) for kind in kinds)
    print(
        f"{total} injections of {len(kinds)} kinds in {time.monotonic() - begin:.0f} s, "
        f"{failures} not as stated"
    )
    if failures:
        return 1
    if arguments.write is not None:
        write_table(arguments.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
