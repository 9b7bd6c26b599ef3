"""report.png: the metrics of a run over its steps.

Reward, loss or KL, entropy and clip fraction; where a run has them gradient norm, KL to the
reference, completion length and the share of truncated completions.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastrl.config import RunConfig
from fastrl.config.phases import RLPhaseConfig
from fastrl.training.file_summary import KL, KL_TITLE
from fastrl.training.log_files import iter_metrics

REPORT_FILE = "report.png"

# What is shown of each loss.
_METRICS = ("loss", KL, "entropy", "clip_fraction", "kl_ref")

_HELDOUT = "held out"

# What is shown of a step as a whole: the panel, and the name of the curve in it.
_OF_A_STEP = {
    "grad_norm": ("gradient norm", "before clipping"),
    "completion_length": ("completion length (tokens)", "training"),
    "finished": ("share of truncated completions", "training"),
    "heldout/finished": ("share of truncated completions", _HELDOUT),
}


def write_report(run_dir: Path, config: RunConfig, *, title: str) -> Path:
    """Plots the metrics of a run into its folder; the file appears complete or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = report_figure(iter_metrics(run_dir), config)
    figure.suptitle(title)
    temporary = run_dir / f".{REPORT_FILE}.{os.getpid()}.png"
    try:
        FigureCanvasAgg(figure).print_png(str(temporary))
        return temporary.replace(run_dir / REPORT_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def report_figure(records: Iterable[Mapping[str, Any]], config: RunConfig) -> Any:
    """The figure of the records of a run, which are read once and not kept.

    Rewards that come from rollout files are those of the policy that wrote them, and are named so.
    In place of a policy-gradient loss, which is about 0 whatever is learned, stands KL(old, new).
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curves = _Curves(config)
    for record in records:
        curves.add(record)
    panels = curves.panels()
    rows = 2 + -(-len(panels) // 2)
    figure = Figure(figsize=(11, 3.5 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, sharex=True)
    _draw(axes[0, 0], "reward", curves.rewards())
    _draw_losses(axes[0, 1], curves)
    _draw(axes[1, 0], "entropy (nats a token)", curves.of("entropy"))
    _draw(axes[1, 1], "clip fraction", curves.of("clip_fraction"))
    shown = list(axes.flat)
    if len(panels) % 2:
        shown.pop().remove()
        axes[-2, 1].tick_params(labelbottom=True)
    for axis, (title, known) in zip(shown[4:], panels.items(), strict=True):
        _draw(axis, title, known)
    for axis in shown[-2:]:
        axis.set_xlabel("step")
    for axis in shown:
        for end in curves.phase_ends:
            axis.axvline(end, color="grey", linewidth=0.8, linestyle=":")
    for axis in figure.axes:  # the right-hand ones too
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


class _Curve:
    """Values over steps: 16 bytes a point, however long the run."""

    def __init__(self) -> None:
        self.points = (array("q"), array("d"))

    def __len__(self) -> int:
        return len(self.points[0])

    def add(self, step: int, value: float) -> None:
        self.points[0].append(step)
        self.points[1].append(value)


class _Curves:
    """The curves of a run's records, taken one at a time.

    Attributes:
        phase_ends: places between phases.
    """

    def __init__(self, config: RunConfig) -> None:
        self.phase_ends: list[float] = []
        self._rewards = {name: _Curve() for name in ("of the files", "training", _HELDOUT)}
        self._of_steps: dict[str, dict[str, _Curve]] = {}
        self._by_metric: dict[str, dict[str, _Curve]] = {name: {} for name in _METRICS}
        self._last: tuple[int, str] | None = None
        self._on_files = {
            config.phase_name(index)
            for index, phase in enumerate(config.phases)
            if isinstance(phase, RLPhaseConfig) and phase.rollouts.type == "files"
        }

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes the points of a record."""
        step, phase = record["step"], record["phase"]
        if self._last is not None and self._last[1] != phase:
            self.phase_ends.append(self._last[0] + 0.5)
        self._last = (step, phase)
        if "reward" in record:
            source = "of the files" if phase in self._on_files else "training"
            self._rewards[source].add(step, record["reward"])
        if "heldout/reward" in record:
            self._rewards[_HELDOUT].add(step, record["heldout/reward"])
        for key, (title, name) in _OF_A_STEP.items():
            if key in record:
                value = 1 - record[key] if key.endswith("finished") else record[key]
                self._of_steps.setdefault(title, {}).setdefault(name, _Curve()).add(step, value)
        for key, value in record.items():
            name, _, metric = key.rpartition("/")
            # That of a policy, which has a KL, is not shown.
            is_shown = metric in self._by_metric and not (
                metric == "loss" and f"{name}/{KL}" in record
            )
            if name and is_shown:
                self._by_metric[metric].setdefault(name, _Curve()).add(step, value)

    def rewards(self) -> dict[str, _Curve]:
        """By where their documents come from."""
        return {name: curve for name, curve in self._rewards.items() if curve}

    def panels(self) -> dict[str, dict[str, _Curve]]:
        """What only some runs have, by the title of its panel."""
        panels = {**self._of_steps, "KL(new, reference) (nats a token)": self.of("kl_ref")}
        return {title: curves for title, curves in sorted(panels.items()) if curves}

    def of(self, metric: str) -> dict[str, _Curve]:
        """Of a metric, by the name of the loss."""
        return self._by_metric[metric]


def _draw_losses(axis: Any, curves: _Curves) -> None:
    """Plots losses, and the KL of policies on a scale of its own where there are both."""
    divergences, losses = curves.of(KL), curves.of("loss")
    if not losses or not divergences:
        title = f"{KL_TITLE} (nats a token)" if divergences else "loss"
        _draw(axis, title, divergences or losses)
        return
    _draw(axis, f"loss, {KL_TITLE} (right, nats a token)", losses)
    right = axis.twinx()
    _plot(right, {f"{name} (right)": curve for name, curve in divergences.items()}, len(losses))
    axis.get_legend().remove()
    right.legend(handles=[*axis.lines, *right.lines], loc="upper right")


def _draw(axis: Any, title: str, curves: Mapping[str, _Curve]) -> None:
    axis.set_title(title)
    axis.grid(alpha=0.3)
    _plot(axis, curves)
    if curves:
        axis.legend(loc="best")


def _plot(axis: Any, curves: Mapping[str, _Curve], first_color: int = 0) -> None:
    for number, (name, curve) in enumerate(curves.items(), first_color):
        # Few points, perhaps one, which a line alone would not show.
        style = {"color": "black", "marker": "o"} if name == _HELDOUT else {"color": f"C{number}"}
        axis.plot(*curve.points, linewidth=1.0, label=name, **style)
