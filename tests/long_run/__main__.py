"""Trains a tiny model for long and fails where it holds more at the end: python -m tests.long_run.

A phase samples, a phase takes rollout files; each makes `--steps` steps. What each process holds
after step 200 of a phase is compared with its end: resident memory (and that of a GPU) within 1 %,
and no new handle, thread, process or compiled variant.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fastrl.config.yaml_text import dump_yaml, parse_yaml
from tests.helpers.rollout_file import write_rollout_file
from tests.helpers.runs import TINY

FIRST = 200
GROWTH = 0.01  # of memory, as a share
PROCESS = "tests.long_run.process"


def main(arguments: list[str] | None = None) -> int:
    """Runs and compares; 1 if something has grown."""
    parser = argparse.ArgumentParser(prog="python -m tests.long_run", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of each phase")
    parser.add_argument("--ranks", type=int, default=1, help="data ranks: gloo, NCCL on GPUs")
    parser.add_argument("--first", type=int, default=FIRST, help="step of a phase to compare with")
    parser.add_argument("--compile", action="store_true", help="the decoder layers")
    parser.add_argument("--task", help="FILE.py:Task, on letters; else one of reasoning-gym")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(dump_yaml(_config(folder, options)), encoding="utf-8")
        _train(config, folder, options)
        reports = [
            _ends(json.loads((folder / f"held-{rank}.json").read_text(encoding="utf-8")))
            for rank in range(options.ranks)
        ]
    grown = []
    for rank, records in enumerate(reports):
        for first, last in zip(records[::2], records[1::2], strict=True):
            grown += compared(f"rank {rank}, {first['phase']}", first, last)
    if options.json is not None:
        numbers = {
            "command": f"python -m tests.long_run --steps {options.steps} --ranks {options.ranks}"
            + (f" --task {options.task}" if options.task else ""),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "held": reports,
            "grown": grown,
        }
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print("\n".join(grown) or "nothing has grown")
    return int(bool(grown))


def _config(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = parse_yaml(TINY)
    write_rollout_file(folder / "rollouts.jsonl")
    sampled = values["phases"][1] | {"name": "sampler", "steps": options.steps}
    sampled["rollouts"] = {"type": "sampler", "prompts_per_step": 2, "group_size": 2}
    files = sampled | {"name": "files", "losses": {"policy": {"type": "gspo"}}}
    files["rollouts"] = {
        "type": "files", "paths": [str(folder / "rollouts.jsonl")], "documents_per_step": 4,
    }  # fmt: skip
    values["phases"] = [sampled, files]
    values["logging"] = {"samples_every": 10, "tensorboard": True, "report": True}
    values["checkpoint"] = {"every": max(options.steps // 20, 1)}
    values["evaluation"] = {"every": max(options.steps // 20, 1)}
    values["parallel"] = {"data": options.ranks}
    values["dtype"] = "float32"
    values["compile"] = options.compile
    if options.task is not None:
        values["environment"] = {
            "type": "python", "path": options.task, "train_prompts": 300, "heldout_prompts": 16,
        }  # fmt: skip
        values["tokenizer"]["characters"] += string.ascii_lowercase
    return values


def _train(config: Path, folder: Path, options: argparse.Namespace) -> None:
    launcher = [sys.executable]
    if options.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(options.ranks)]
    arguments = [str(config), str(folder / "run"), str(folder / "held"), str(options.first)]
    subprocess.run(
        [*launcher, "-m", PROCESS, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )


def _ends(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first and the last record of each phase."""
    ends = []
    for phase in dict.fromkeys(record["phase"] for record in records):
        of_phase = [record for record in records if record["phase"] == phase]
        ends += [of_phase[0], of_phase[-1]]
    return ends


def compared(where: str, first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """Prints both, and gives what has grown."""
    grown = []
    print(f"{where}: after step {first['step']} and {last['step']}")
    for name, before in first.items():
        if name in ("phase", "step"):
            continue
        after = last[name]
        is_memory = name.endswith("_bytes") or name == "objects"
        share = f"{after / before - 1:+.2%}" if before else ""
        print(f"  {name:22} {before:14,} {after:14,}  {share}")
        if after > before * (1 + GROWTH if is_memory else 1):
            grown.append(f"{where}: `{name}` has grown from {before:,} to {after:,}")
    return grown


if __name__ == "__main__":
    sys.exit(main())
