"""Compares random cases of the head with its definition: python -m tests.fuzz --minutes 30."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.fuzz.cases import draw_case
from tests.fuzz.compare import check
from tests.helpers.poison import poison_empty_memory
from tests.helpers.ranks import RankPool


def main(arguments: list[str] | None = None) -> int:
    """Runs cases from a seed on; 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next is one on")
    parser.add_argument("--case", type=int, help="run the case of this seed alone")
    parser.add_argument("--ranks", type=int, default=2, help="leave out cases of more ranks")
    parser.add_argument("--device", default="cpu", help="of cases on one rank")
    parser.add_argument("--stop-after", type=int, default=20, help="failing cases")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        pool = RankPool(Path(directory))
        try:
            return _run(options, pool)
        finally:
            pool.close()


def _run(options: argparse.Namespace, pool: RankPool) -> int:
    if options.case is not None:
        problem = _checked(options.case, pool, options.device)
        print(problem or f"case {options.case}: as the definition")
        return int(problem not in (None, "edge"))
    start, seed = time.monotonic(), options.seed
    counts: Counter[str] = Counter()
    failed: list[int] = []
    with suppress(KeyboardInterrupt):  # what was tried is told all the same
        while time.monotonic() - start < 60 * options.minutes and len(failed) < options.stop_after:
            case = draw_case(seed)
            if case.layout.world_size <= options.ranks:
                problem = _checked(seed, pool, options.device)
                counts[str(case.dtype).removeprefix("torch.")] += 1
                counts["ranks"] += case.layout.world_size > 1
                counts["edges"] += problem == "edge"
                if problem not in (None, "edge"):
                    failed.append(seed)
                    print(f"{problem}\n  again: python -m tests.fuzz --case {seed}\n", flush=True)
            seed += 1
    total = sum(number for name, number in counts.items() if name not in ("ranks", "edges"))
    took = (time.monotonic() - start) / 60
    print(
        f"seeds {options.seed} to {seed - 1}: {total} cases in {took:.1f} min {dict(counts)};"
        f" {len(failed)} failed {failed}"
    )
    return int(bool(failed))


def _checked(seed: int, pool: RankPool, device: str) -> str | None:
    """What is wrong with the case; an error of the head is."""
    try:
        return check(seed, pool, torch.device(device))
    except Exception:
        return f"{draw_case(seed)}\n{traceback.format_exc()}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    poison_empty_memory(pytest.MonkeyPatch())
    sys.exit(main())
