"""report.png: reward, loss or KL, entropy and clip fraction over the steps of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastrl.config import RunConfig
from fastrl.config.phases import RLPhaseConfig
from fastrl.training.file_summary import KL, KL_TITLE
from fastrl.training.log_files import read_metrics

REPORT_FILE = "report.png"

Curve = tuple[list[int], list[float]]


def write_report(run_dir: Path, config: RunConfig, *, title: str) -> Path:
    """Plots the metrics of a run into its folder; the file appears complete or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = report_figure(read_metrics(run_dir), config)
    figure.suptitle(title)
    temporary = run_dir / f".{REPORT_FILE}.{os.getpid()}.png"
    try:
        FigureCanvasAgg(figure).print_png(str(temporary))
        return temporary.replace(run_dir / REPORT_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def report_figure(records: Sequence[dict[str, Any]], config: RunConfig) -> Any:
    """The figure of the records of a run.

    Rewards that come from rollout files are those of the policy that wrote them, and are named so.
    In place of a policy-gradient loss, which is about 0 whatever is learned, stands KL(old, new).
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    _draw(axes[0, 0], "reward", _rewards(records, config))
    steps, rewards = _curve(records, "heldout/reward")
    if steps:
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
    for axis in figure.axes:  # the right-hand ones too
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _rewards(records: Sequence[dict[str, Any]], config: RunConfig) -> dict[str, Curve]:
    """The rewards of the documents that were trained on, by where they come from."""
    on_files = {
        config.phase_name(index)
        for index, phase in enumerate(config.phases)
        if isinstance(phase, RLPhaseConfig) and phase.rollouts.type == "files"
    }
    curves = {
        "of the files": _curve([r for r in records if r["phase"] in on_files], "reward"),
        "training": _curve([r for r in records if r["phase"] not in on_files], "reward"),
    }
    return {name: curve for name, curve in curves.items() if curve[0]}


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
    """Plots losses, and the KL of policies on a scale of its own where there are both."""
    divergences = _curves(records, KL)
    losses = _curves([_without_policy_losses(record) for record in records], "loss")
    if not losses or not divergences:
        title = f"{KL_TITLE} (nats a token)" if divergences else "loss"
        _draw(axis, title, divergences or losses)
        return
    _draw(axis, f"loss, {KL_TITLE} (right, nats a token)", losses)
    right = axis.twinx()
    _plot(right, {f"{name} (right)": curve for name, curve in divergences.items()}, len(losses))
    axis.get_legend().remove()
    right.legend(handles=[*axis.lines, *right.lines], loc="upper right")


def _without_policy_losses(record: dict[str, Any]) -> dict[str, Any]:
    has_kl = {key.removesuffix(KL) + "loss" for key in record if key.endswith(f"/{KL}")}
    return {key: value for key, value in record.items() if key not in has_kl}


def _draw(axis: Any, title: str, curves: dict[str, Curve]) -> None:
    axis.set_title(title)
    axis.grid(alpha=0.3)
    _plot(axis, curves)
    if curves:
        axis.legend(loc="best")


def _plot(axis: Any, curves: dict[str, Curve], first_color: int = 0) -> None:
    for number, (name, (steps, values)) in enumerate(curves.items(), first_color):
        axis.plot(steps, values, linewidth=1.0, label=name, color=f"C{number}")
