"""The last line of a run on rollout files: what such a run can know of itself.

It samples nothing, so it has no reward of its own: the files' reward is that of the policy that
wrote them, and stays what it is. The policy-gradient loss is no measure either: with advantages
centred in their group and ratios near 1 it is about 0, whatever is learned. How far the model went
from the files' policy is what is left: the clip fraction and KL(old, new).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

KL, KL_TITLE = "kl_old_new", "KL(old, new)"
"""The metric of a loss, and what people read."""


class FileSummary:
    """The steps of a phase on rollout files, as its last line tells of them."""

    def __init__(self) -> None:
        self._rewards = self._num_rewards = 0.0
        self._first: Mapping[str, float] | None = None
        self._last: Mapping[str, float] = {}
        self._active: list[float] = []

    def add(self, metrics: Mapping[str, float]) -> None:
        """Notes the metrics of a step."""
        if "active_groups" in metrics:
            self._active.append(metrics["active_groups"])
        if "reward" in metrics:
            self._rewards += metrics["reward"]
            self._num_rewards += 1
        if "loss" in metrics:  # false for a step without documents
            self._first = metrics if self._first is None else self._first
            self._last = metrics

    def warning(self, phase: str) -> str | None:
        """What to say of a phase whose rewards taught nothing in any step; None for others."""
        if not self._active or any(self._active):
            return None
        return (
            f"warning: phase `{phase}` had nothing to learn from rewards: in none of its "
            f"{len(self._active)} steps did a group have rewards that differ, or an advantage that "
            "is not 0; look at samples.jsonl, and for problems neither too hard nor too easy"
        )

    def line(self, losses: Collection[str]) -> str:
        """The reward of the files, and each measure in the first and the last step.

        Args:
            losses: names of the phase's losses.
        """
        if self._first is None:
            return "no steps"
        parts: list[str] = []
        if self._num_rewards:
            parts.append(f"reward of the files: {self._rewards / self._num_rewards:.2f}")
        for metric, text, digits in (("clip_fraction", "clip fraction", 3), (KL, KL_TITLE, 4)):
            known = [name for name in losses if f"{name}/{metric}" in self._first]
            for name in known:
                of_loss = f" of {name}" if len(known) > 1 else ""
                ends = [ms[f"{name}/{metric}"] for ms in (self._first, self._last)]
                parts.append(f"{text}{of_loss}: {ends[0]:.{digits}f} -> {ends[1]:.{digits}f}")
        return ", ".join(parts) or "trained on files, without metrics"
