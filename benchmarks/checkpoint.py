"""How long a checkpoint stops a run, with and without writing in the background.

    python -m benchmarks.checkpoint --shape llama-1b --json benchmarks/results/checkpoint.json

Weights, both moments and, with `--reference`, a reference policy are saved as `fastrl train` does.
`blocking` is the time until training may go on, `total` until the checkpoint is on the disk under
its name: planning, copies, writing, fsync, checksums. The first one in the background also gets the
page-locked memory. Under torchrun the model is fully sharded, and the times are those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import environment
from benchmarks.memory_cases import DTYPES, llama
from benchmarks.update_cases import MODELS
from fastrl.config import RunConfig, load_config
from fastrl.config.phases import OptimizerConfig
from fastrl.config.training import ParallelConfig
from fastrl.models.llama import Llama
from fastrl.training.llama_model import llama_files
from fastrl.training.optimizer import build_optimizer, optimizer_state
from fastrl.training.processes import Processes, empty_llama, frozen_copy, start_processes
from fastrl.training.saving import CheckpointSaver
from fastrl.training.trainer_state import TrainerState, trained_names

CONFIG = Path(__file__).parent.parent / "examples" / "llama_grpo.yaml"
MODES = {"waits": False, "background": True}  # asynchronous


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-1b", choices=MODELS)
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the weights")
    parser.add_argument("--reference", action="store_true", help="save a reference policy too")
    parser.add_argument("--repeats", type=int, default=3, help="checkpoints after the first one")
    parser.add_argument("--modes", default=",".join(MODES), help="of writing, one after the other")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    processes = start_processes(ParallelConfig(data=size, fully_sharded=size > 1), device)
    model, state = _trained(options, processes)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        # That of the first rank, which all ranks then have.
        folder = Path(processes.gather(temporary)[0])
        for mode in options.modes.split(","):
            asynchronous = MODES[mode]
            run_dir = folder / f"asynchronous-{asynchronous}"
            if processes.is_main:
                run_dir.mkdir()
            rows.append(_row(options, processes, model, state, run_dir, asynchronous))
            if processes.is_main and options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
        processes.any(False)  # no rank looks at the folder any more
    processes.close()


def _trained(options: argparse.Namespace, processes: Processes) -> tuple[Llama, TrainerState]:
    """A model and the state that one update leaves."""
    model = empty_llama(llama(MODELS[options.shape]), processes, DTYPES[options.dtype])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.02)
            parameter.grad = torch.zeros_like(parameter)
    reference = frozen_copy(model, processes) if options.reference else None
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-6))
    optimizer.step()
    optimizer.zero_grad()
    return model, TrainerState(
        rewards=(0.5,),
        optimizer=optimizer_state(optimizer, trained_names(model)),
        reference=None if reference is None else dict(reference.named_parameters()),
    )


def _row(
    options: argparse.Namespace,
    processes: Processes,
    model: Llama,
    state: TrainerState,
    run_dir: Path,
    asynchronous: bool,
) -> dict[str, Any]:
    """Times of the checkpoints of one mode, and what a last one holds."""
    overrides = [f"checkpoint.asynchronous={str(asynchronous).lower()}", "checkpoint.keep=1"]
    config = load_config(RunConfig, CONFIG, overrides)
    blocking, total = [], []
    with CheckpointSaver(run_dir, config, processes, print) as saver:
        for _ in range(1 + options.repeats):
            if processes.device.type == "cuda":
                torch.cuda.synchronize()
            processes.any(False)
            start = time.perf_counter()
            saver.save(llama_files(model), state, {})
            blocking.append(time.perf_counter() - start)
            saver.wait()
            total.append(time.perf_counter() - start)
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    row = {
        "shape_name": options.shape,
        "dtype": options.dtype,
        "reference": options.reference,
        "ranks": processes.size,
        "asynchronous": asynchronous,
        "bytes": sum(path.stat().st_size for path in files),
        "first_blocking_ms": round(1e3 * blocking[0], 1),
        "blocking_ms": round(1e3 * statistics.median(blocking[1:]), 1),
        "total_s": round(statistics.median(total[1:]), 3),
        **environment(),
    }
    if processes.is_main:
        print(
            f"{'background' if asynchronous else 'waits':10s} {row['bytes'] / 1e9:7.3f} GB, "
            f"blocking {row['blocking_ms']:9.1f} ms (the first {row['first_blocking_ms']:.1f}), "
            f"total {row['total_s']:.3f} s",
            flush=True,
        )
    return row


if __name__ == "__main__":
    main()
