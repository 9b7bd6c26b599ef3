"""Log files of a run: metrics.jsonl, samples.jsonl and TensorBoard events."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fastrl.training.rollouts import Sample
from fastrl.training.run_folder import check_in_place
from fastrl.training.trackers import Tracker, close_trackers, tag

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class NoWriter:
    """The writer of the processes that write no files."""

    def log(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        pass

    def log_samples(self, step: int, phase: str, samples: Iterable[Sample]) -> None:
        pass

    def logged(self, phase: str) -> Iterable[Mapping[str, Any]]:
        return ()

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class MetricsWriter:
    """The writer that appends to a run's log files; each call writes whole lines.

    Args:
        folder: of the run.
        tensorboard: whether to write events too, which needs the tensorboard package.
        first_step: steps done before, if the folder has the records of them and of nothing else;
            TensorBoard discards the events from that step on, and gets those of the records. None
            for a new folder.
        trackers: that get the same metrics.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        first_step: int | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._trackers = trackers
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._events = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=first_step)
        self._folder = folder
        self._metrics = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._samples = (folder / SAMPLES_FILE).open("a", encoding="utf-8")
        if self._events is not None and first_step is not None:
            self._repeat_events(first_step)

    def log(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step.

        Args:
            step: number of steps done in the run, over all phases.
            phase: its name; it prefixes the tags of TensorBoard.
            values: finite numbers by name.
        """
        _write_line(self._metrics, {"step": step, "phase": phase, **values})
        self._add_events(step, phase, values)
        for tracker in self._trackers:
            tracker.log(step, phase, values)

    def log_samples(self, step: int, phase: str, samples: Iterable[Sample]) -> None:
        for sample in samples:
            _write_line(self._samples, {"step": step, "phase": phase, **asdict(sample)})

    def logged(self, phase: str) -> Iterable[Mapping[str, Any]]:
        """The records of a phase in the metrics file, one at a time."""
        return (record for record in iter_metrics(self._folder) if record["phase"] == phase)

    def sync(self) -> None:
        """Puts what was written on the disk, as a checkpoint of the same step will be."""
        for file in (self._metrics, self._samples):
            os.fsync(file.fileno())
        if self._events is not None:
            self._events.flush()

    def _add_events(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(tag(phase, name), value, step)

    def _repeat_events(self, step: int) -> None:
        """Writes the events of a step again, as those of one phase cannot be discarded alone."""
        for record in iter_metrics(self._folder):
            if record.pop("step") == step:
                self._add_events(step, record.pop("phase"), record)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        close_trackers(self._trackers)
        if self._events is not None:
            self._events.close()


def iter_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of a run's metrics file, one at a time."""
    with (folder / METRICS_FILE).open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def drop_records_after(folder: Path, step: int, new_phase: str | None) -> list[str]:
    """Drops the lines that a run wrote after the checkpoint that it resumes from.

    Lines that are no records, as a full disk or a crash leaves them, go too.

    Args:
        folder: of the run.
        step: of the checkpoint, over all phases; -1 without one.
        new_phase: name of the phase whose evaluation at this step will be repeated; None if none
            will be.

    Returns:
        What is wrong with the lines before the checkpoint, a sentence each.
    """
    problems = []
    for name in (METRICS_FILE, SAMPLES_FILE):
        source, temporary = folder / name, folder / f".{name}.partial"
        if not source.exists():
            if step >= 0:
                problems.append(f"{source}: is not there; records begin after step {step}")
            continue
        with source.open("rb") as lines, temporary.open("wb") as kept:
            lost = _copy(lines, kept, step, new_phase)
            kept.flush()
            os.fsync(kept.fileno())
        temporary.replace(source)
        if lost:
            problems.append(f"{source}: {lost} lines before step {step} were no records; dropped")
    return problems


def _copy(lines: IO[bytes], kept: IO[bytes], step: int, new_phase: str | None) -> int:
    """Copies the records that stay; the number of broken lines before the last of them."""
    broken = lost = 0
    for line in lines:
        record = _record(line)
        if record is None:
            broken += 1
        elif _stays(record, step, new_phase):
            kept.write(line if line.endswith(b"\n") else line + b"\n")
            lost = broken
    return lost


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None for one that is torn, blank or of something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record if isinstance(record.get("phase"), str) else None


def _stays(record: Mapping[str, Any], step: int, new_phase: str | None) -> bool:
    return bool(record["step"] <= step and (record["step"], record["phase"]) != (step, new_phase))


def _write_line(file: IO[str], record: Mapping[str, Any]) -> None:
    check_in_place(file)
    file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()
