"""report.png: reward, loss, entropy and clip fraction over the steps of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastrl.training.log_files import read_metrics

REPORT_FILE = "report.png"

Curve = tuple[list[int], list[float]]


def write_report(run_dir: Path, *, title: str) -> Path:
    """Plots the metrics of a run into its folder; the file appears complete or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(run_dir)
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    figure.suptitle(title)
    _draw(axes[0, 0], "reward", {"training": _curve(records, "reward")})
    steps, rewards = _curve(records, "heldout/reward")
    axes[0, 0].plot(steps, rewards, "o-", color="black", label="held out")
    axes[0, 0].legend(loc="best")
    _draw_losses(axes[0, 1], records)
    _draw(axes[1, 0], "entropy (nats a token)", _curves(records, "entropy"))
    _draw(axes[1, 1], "clip fraction", _curves(records, "clip_fraction"))
    for axis in axes[1]:
        axis.set_xlabel("step")
    ends = [
        before["step"] + 0.5
        for before, after in itertools.pairwise(records)
        if before["phase"] != after["phase"]
    ]
    for axis in axes.flat:
        for end in ends:
            axis.axvline(end, color="grey", linewidth=0.8, linestyle=":")
    temporary = run_dir / f".{REPORT_FILE}.{os.getpid()}.png"
    try:
        FigureCanvasAgg(figure).print_png(str(temporary))
        return temporary.replace(run_dir / REPORT_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def _curve(records: Sequence[dict[str, Any]], key: str) -> Curve:
    points = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in points], [value for _, value in points]


def _curves(records: Sequence[dict[str, Any]], metric: str) -> dict[str, Curve]:
    """The curves of a metric by the name of the loss."""
    names = {
        key.removesuffix(f"/{metric}"): key
        for record in records
        for key in record
        if key.endswith(f"/{metric}")
    }
    return {name: _curve(records, key) for name, key in names.items()}


def _draw_losses(axis: Any, records: Sequence[dict[str, Any]]) -> None:
    """Plots the last phase on its own scale: a policy loss is far below a cross-entropy."""
    last = records[-1]["phase"] if records else None
    before = _curves([record for record in records if record["phase"] != last], "loss")
    curves = _curves([record for record in records if record["phase"] == last], "loss")
    if not before:
        _draw(axis, "loss", curves)
        return
    _draw(axis, "loss", before)
    right = axis.twinx()
    _plot(right, {f"{name} (right)": curve for name, curve in curves.items()}, len(before))
    axis.get_legend().remove()
    right.legend(handles=[*axis.lines, *right.lines], loc="upper right")


def _draw(axis: Any, title: str, curves: dict[str, Curve]) -> None:
    axis.set_title(title)
    axis.grid(alpha=0.3)
    _plot(axis, curves)
    if curves:
        axis.legend(loc="best")


def _plot(axis: Any, curves: dict[str, Curve], first_color: int = 0) -> None:
    for number, (name, (steps, values)) in enumerate(curves.items(), first_color):
        axis.plot(steps, values, linewidth=1.0, label=name, color=f"C{number}")
