"""Experiment trackers beside the log files: Weights & Biases and trackio, where they are asked for.

A tracker gets the numbers of metrics.jsonl under the tags of TensorBoard. A resumed run goes on in
the tracker's own run, whose id stands in the run's folder.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fastrl.config import RunConfig, UserError
from fastrl.training.run_folder import LOCK_FILE

TRACKERS_FILE = "trackers.json"


class Tracker(Protocol):
    """A sink of metrics."""

    def log(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        """Takes the metrics of a step, as `MetricsWriter.log` does."""
        ...

    def close(self) -> None: ...


class WandbTracker:
    """A run of Weights & Biases.

    The step is a metric of its own: a run that goes on repeats steps, which wandb's would refuse.
    """

    def __init__(self, config: RunConfig, run_dir: Path, run_id: str) -> None:
        self._run: Any = import_module("wandb").init(
            project=config.logging.project,
            name=run_dir.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        self._run.log({**_tagged(phase, values), "step": step})

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A run of trackio; its name is that of the folder, with the id to tell it from others."""

    def __init__(self, config: RunConfig, run_dir: Path, run_id: str) -> None:
        self._run: Any = import_module("trackio").init(
            project=config.logging.project,
            name=f"{run_dir.resolve().name}-{run_id}",
            resume="allow",
            config=config.model_dump(mode="json"),
        )

    def log(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        self._run.log(_tagged(phase, values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(config: RunConfig, run_dir: Path) -> list[Tracker]:
    """The trackers that the config asks for, in the folder of a run that exists.

    Raises:
        UserError: one of them does not start, as without a login; nothing is left in a new folder.
    """
    kinds: dict[str, type[WandbTracker | TrackioTracker]] = {}
    if config.logging.wandb:
        kinds["wandb"] = WandbTracker
    if config.logging.trackio:
        kinds["trackio"] = TrackioTracker
    is_new = {path.name for path in run_dir.iterdir()} <= {LOCK_FILE}
    opened: list[Tracker] = []
    for name, kind in kinds.items():
        try:
            opened.append(kind(config, run_dir, _run_id(run_dir, name)))
        except Exception as error:  # of their own classes, and of the network
            close_trackers(opened)
            if is_new:
                (run_dir / TRACKERS_FILE).unlink()
                shutil.rmtree(run_dir / "wandb", ignore_errors=True)
            raise UserError(
                f"`logging.{name}`: {name} does not start: {error}; log in, set it to work "
                "offline, or set the option to false"
            ) from error
    return opened


def close_trackers(trackers: Sequence[Tracker]) -> None:
    """Ends all runs of the trackers."""
    for tracker in trackers:
        tracker.close()


def _run_id(run_dir: Path, name: str) -> str:
    """The id of the tracker's run, made for the first call and kept in the folder."""
    file = run_dir / TRACKERS_FILE
    known: dict[str, str] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if name not in known:
        known[name] = secrets.token_hex(4)
        file.write_text(json.dumps(known) + "\n", encoding="utf-8")
    return known[name]


def tag(phase: str, name: str) -> str:
    """What a metric of a phase is called where the phase has no place of its own."""
    return name if name.startswith("heldout/") else f"{phase}/{name}"


def _tagged(phase: str, values: Mapping[str, float]) -> dict[str, float]:
    return {tag(phase, name): value for name, value in values.items()}
