"""One process of a long run: trains by the command line and writes down what it holds.

python -m tests.long_run.process CONFIG RUN_DIR REPORT FIRST_STEP
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from fastrl.cli import main
from fastrl.training.run import Trainer

PROC = Path("/proc/self")


def held() -> dict[str, int]:
    """What this process holds now: bytes, and counts of handles, threads, processes, variants."""
    gc.collect()
    # What is freed but not given back is fragmentation, which goes up and down.
    ctypes.CDLL(None).malloc_trim(0)
    counts = {
        "resident_bytes": _resident_bytes(),
        "objects": len(gc.get_objects()),
        "handles": len(os.listdir(PROC / "fd")),
        "threads": len(os.listdir(PROC / "task")),
        "python_threads": threading.active_count(),
        "children": num_children(),
        "compiled_graphs": _compiled_graphs(),
        "kernel_variants": _kernel_variants(),
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        counts["cuda_allocated_bytes"] = torch.cuda.memory_allocated()
        counts["cuda_reserved_bytes"] = torch.cuda.memory_reserved()
    return counts


def _resident_bytes() -> int:
    pages = int((PROC / "statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_children() -> int:
    """Number of processes that this one has started and that have not been waited for."""
    lists = (path.read_text(encoding="ascii") for path in (PROC / "task").glob("*/children"))
    return sum(len(text.split()) for text in lists)


def _compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _kernel_variants() -> int:
    """Compiled variants of the Triton kernels, over all devices."""
    kernels = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("fastrl.kernels")
        for value in vars(module).values()
        if hasattr(value, "device_caches")
    }
    return sum(
        len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values()
    )


def watch(report: Path, first: int) -> None:
    """Writes down what is held after step `first` of each phase, and every so many after it."""
    step = Trainer._step
    records: list[dict[str, Any]] = []

    def watched(trainer: Trainer, phase: Any) -> None:
        step(trainer, phase)
        done, last = phase.steps_done, phase.config.steps
        if done and (done % first == 0 or done == last):
            trainer._saver.wait()  # a checkpoint under way has its files open
            records.append({"phase": phase.name, "step": done, **held()})
            report.write_text(json.dumps(records), encoding="utf-8")

    Trainer._step = watched  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    config, run_dir, report, first = sys.argv[1:]
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    watch(Path(f"{report}-{rank}.json"), int(first))
    sys.exit(main(["train", config, "--run-dir", run_dir]))
