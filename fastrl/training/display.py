"""The progress of a run: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fastrl.training.evaluate import Evaluation
from fastrl.training.rollouts import Sample

_SECONDS_BETWEEN_LINES = 5.0


class Display(Protocol):
    """The display of a running run."""

    def begin_phase(self, name: str, steps: int, steps_done: int) -> None:
        """A phase begins, or resumes after `steps_done` of its steps."""
        ...

    def step(self, metrics: Mapping[str, float]) -> None: ...

    def samples(self, samples: Sequence[Sample]) -> None:
        """Some completions of a step."""
        ...

    def evaluation(self, evaluation: Evaluation) -> None:
        """The held-out prompts were scored."""
        ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_display(console: Console) -> Display:
    """A live display on a terminal, plain lines elsewhere; nothing on a quiet console."""
    is_live = console.is_terminal and not console.quiet
    return LiveDisplay(console) if is_live else PlainDisplay(console)


class LiveDisplay:
    """A progress bar for each phase; samples and evaluations scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
        )
        self._task: TaskID | None = None
        self._progress.start()

    def begin_phase(self, name: str, steps: int, steps_done: int) -> None:
        self._task = self._progress.add_task(name, total=steps, completed=steps_done, numbers="")

    def step(self, metrics: Mapping[str, float]) -> None:
        assert self._task is not None
        self._progress.update(self._task, advance=1, numbers=_numbers(metrics))

    def samples(self, samples: Sequence[Sample]) -> None:
        table = Table(
            "prompt", "completion", "reward", box=None, padding=(0, 2), title_justify="left"
        )
        for sample in samples:
            table.add_row(*_cells(sample))
        self._progress.console.print(table)

    def evaluation(self, evaluation: Evaluation) -> None:
        self.message(_heldout(evaluation))

    def message(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class PlainDisplay:
    """Lines of text: at a phase's ends and every few seconds between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
        self._steps = self._done = self._first = 0
        self._begin = self._printed = 0.0

    def begin_phase(self, name: str, steps: int, steps_done: int) -> None:
        self._name, self._steps, self._done, self._first = name, steps, steps_done, steps_done
        self._begin = time.monotonic()
        self._printed = -_SECONDS_BETWEEN_LINES

    def step(self, metrics: Mapping[str, float]) -> None:
        self._done += 1
        now = time.monotonic()
        if self._done < self._steps and now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        left = (now - self._begin) / (self._done - self._first) * (self._steps - self._done)
        minutes, seconds = divmod(round(left), 60)
        self.message(
            f"[{self._name}] step {self._done}/{self._steps}  {_numbers(metrics)}  "
            f"left {minutes}:{seconds:02}"
        )

    def samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            prompt, completion, reward = _cells(sample)
            self.message(f"  {prompt!r} -> {completion!r}  reward {reward}")

    def evaluation(self, evaluation: Evaluation) -> None:
        self.message(_heldout(evaluation))

    def message(self, text: str) -> None:
        print_line(self._console, text)

    def close(self) -> None:
        pass


def _numbers(metrics: Mapping[str, float]) -> str:
    parts = [f"reward {metrics['reward']:.3f}"] if "reward" in metrics else []
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:+.4f}")
    return "  ".join([*parts, f"{metrics['tokens_per_second']:,.0f} tokens/s"])


def _cells(sample: Sample) -> tuple[str, str, str]:
    end = "" if sample.finished else " ..."
    return sample.prompt, sample.completion + end, f"{sample.reward:.2f}"


def _heldout(evaluation: Evaluation) -> str:
    return (
        f"held-out reward {evaluation.reward:.3f} (solved {evaluation.solved:.3f}, "
        f"finished {evaluation.finished:.3f})"
    )


def print_line(console: Console, text: str) -> None:
    """Prints a line of text without markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
