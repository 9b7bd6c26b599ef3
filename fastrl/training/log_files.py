"""Log files of a run: metrics.jsonl, samples.jsonl and TensorBoard events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fastrl.training.rollouts import Sample

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class NoWriter:
    """The writer of the processes that write no files."""

    def log(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        pass

    def log_samples(self, step: int, phase: str, samples: Iterable[Sample]) -> None:
        pass

    def close(self) -> None:
        pass


class MetricsWriter:
    """The writer that appends to a run's log files; each call writes whole lines.

    Args:
        folder: of the run.
        tensorboard: whether to write events too, which needs the tensorboard package.
        first_step: steps done before; TensorBoard discards later events in the folder.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, first_step: int = 0) -> None:
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            events = str(folder / TENSORBOARD_FOLDER)
            self._events = SummaryWriter(events, purge_step=first_step + 1 if first_step else None)
        self._metrics = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._samples = (folder / SAMPLES_FILE).open("a", encoding="utf-8")

    def log(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step.

        Args:
            step: number of steps done in the run, over all phases.
            phase: its name; it prefixes the tags of TensorBoard.
            values: finite numbers by name.
        """
        _write_line(self._metrics, {"step": step, "phase": phase, **values})
        if self._events is not None:
            for name, value in values.items():
                tag = name if name.startswith("heldout/") else f"{phase}/{name}"
                self._events.add_scalar(tag, value, step)

    def log_samples(self, step: int, phase: str, samples: Iterable[Sample]) -> None:
        for sample in samples:
            _write_line(self._samples, {"step": step, "phase": phase, **asdict(sample)})

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        if self._events is not None:
            self._events.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics file."""
    with (folder / METRICS_FILE).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def drop_records_after(folder: Path, step: int, new_phase: str | None) -> None:
    """Drops the lines that a run wrote after the checkpoint that it resumes from.

    Args:
        folder: of the run.
        step: of the checkpoint, over all phases.
        new_phase: name of the phase that begins after the checkpoint, whose evaluation at this step
            will be repeated; None if the run resumes within a phase.
    """
    for name in (METRICS_FILE, SAMPLES_FILE):
        with (folder / name).open(encoding="utf-8") as file:
            kept = [line for line in file if _stays(json.loads(line), step, new_phase)]
        temporary = folder / f".{name}.partial"
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(folder / name)


def _stays(record: Mapping[str, Any], step: int, new_phase: str | None) -> bool:
    return bool(record["step"] <= step and (record["step"], record["phase"]) != (step, new_phase))


def _write_line(file: IO[str], record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()
