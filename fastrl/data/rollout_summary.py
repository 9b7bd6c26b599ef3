"""What rollout files hold: counts, ranges, groups, ratios, and values that look wrong.

One pass over the documents. What stays of each is a handful of numbers.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastrl.data.checks import check_document, checked_tokens
from fastrl.data.columns import DOCUMENT_COLUMNS
from fastrl.data.documents import Array, Document
from fastrl.data.histogram import histogram

_RATIOS = (("logprobs", "rollout_logprobs"), ("logprobs", "ref_logprobs"))

_FAR = math.log(2)
"""A token's ratio above 2 or below 1/2 is far: policies a few updates apart have few of them."""


@dataclass
class _Group:
    """The rollouts of a group id with the same prompt."""

    size: int = 0  # parts of one rollout count once
    rewards: list[float] = field(default_factory=list)
    rollouts: set[int | str] = field(default_factory=set)
    completions: set[int] = field(default_factory=set)


@dataclass
class _Ratio:
    """Ratios of two columns over the labels of the documents that have both."""

    labels: int = 0
    total: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    far: int = 0
    log_total: float = 0.0

    def add(self, difference: Array) -> None:
        """Takes log-ratios [labels] of a document."""
        self.labels += len(difference)
        with np.errstate(over="ignore"):
            self.total += float(np.exp(difference).sum())
        self.log_total += float(difference.sum())
        self.lowest = min(self.lowest, float(difference.min()))
        self.highest = max(self.highest, float(difference.max()))
        self.far += int((np.abs(difference) > _FAR).sum())


class RolloutSummary:
    """The documents of one or several files; `add` each, then `lines`."""

    def __init__(self) -> None:
        self._tokens = array("q")
        self._labels = array("q")
        self._completions = array("q")  # of documents with labels
        self._rewards = array("d")
        self._columns: Counter[str] = Counter()
        self._advantages = 0
        self._ratios = {pair: _Ratio() for pair in _RATIOS}
        self._groups: dict[tuple[object, int], _Group] = {}
        self._prompts: dict[int, set[object]] = {}
        self._sure = 0  # documents with probability 1 at every label
        self._unscored = 0
        self._useless = 0

    def add(self, document: Document) -> None:
        """Takes a document that was checked."""
        ids, learned = checked_tokens(0, document)
        numbers = check_document(0, document)
        num_labels = int(learned.sum())
        self._tokens.append(len(ids))
        self._labels.append(num_labels)
        present = [name for name in DOCUMENT_COLUMNS if getattr(document, name) is not None]
        self._columns.update(name for name in present if name not in ("tokens", "alignment"))
        if document.is_scored:
            assert document.reward is not None
            self._rewards.append(document.reward)
        elif document.group_id is not None:
            self._unscored += 1
        if document.group_id is not None:
            self._add_to_group(document, ids, learned)
        if not num_labels:
            return
        self._completions.append(num_labels)
        has_value = document.advantage is not None
        self._advantages += has_value
        self._useless += not has_value and document.group_id is None
        if "logprobs" in numbers:
            self._sure += not numbers["logprobs"][learned].any()
        for (above, below), ratio in self._ratios.items():
            if above in numbers and below in numbers:
                ratio.add((numbers[above] - numbers[below])[learned].astype(np.float64))

    def _add_to_group(self, document: Document, ids: Array, learned: Array) -> None:
        start = int(learned.argmax()) if learned.any() else len(ids)
        prompt, rollout = hash(ids[:start].tobytes()), document.rollout_id
        # Parts of a rollout have contexts of their own.
        key = (document.group_id, prompt if rollout is None else 0)
        group = self._groups.setdefault(key, _Group())
        group.completions.add(hash(ids[start:].tobytes()))
        if rollout is not None:
            if rollout in group.rollouts:
                return
            group.rollouts.add(rollout)
        else:
            self._prompts.setdefault(prompt, set()).add(document.group_id)
        group.size += 1
        if document.is_scored:
            assert document.reward is not None
            group.rewards.append(document.reward)

    def lines(self) -> Iterator[str]:
        """The summary, for people."""
        if not self._tokens:
            yield "no documents"
            return
        yield f"{len(self._tokens):,} documents, {self._columns_text()}"
        yield f"tokens: {_range(self._tokens)}"
        yield f"labels: {_range(self._labels)}"
        if self._rewards:
            yield f"rewards: {_spread(self._rewards)}"
        if self._groups:
            sizes = Counter(group.size for group in self._groups.values())
            of_size = ", ".join(f"{count:,} of {size}" for size, count in sorted(sizes.items())[:6])
            more = ", ..." if len(sizes) > 6 else ""
            yield f"groups: {len(self._groups):,}: {of_size}{more}"
        for (above, below), ratio in self._ratios.items():
            if ratio.labels:
                yield (
                    f"ratio {above} / {below}: mean {ratio.total / ratio.labels:.4g}, from "
                    f"{math.exp(ratio.lowest):.4g} to {_exp(ratio.highest):.4g} over "
                    f"{ratio.labels:,} labels; log-ratio {ratio.log_total / ratio.labels:+.4g}"
                )
        suspicious = list(self._suspicious())
        yield "suspicious:" if suspicious else "suspicious: nothing"
        yield from (f"  {line}" for line in suspicious)
        yield "labels a document, of those that have any:"
        yield from (f"  {line}" for line in histogram(self._completions))
        if self._rewards:
            yield "rewards:"
            yield from (f"  {line}" for line in histogram(self._rewards))

    def _columns_text(self) -> str:
        everywhere = [name for name, n in self._columns.items() if n == len(self._tokens)]
        partly = [(name, n) for name, n in self._columns.items() if n < len(self._tokens)]
        parts = [f"all with {', '.join(everywhere)}"]
        return "; ".join([*parts, *(f"{n:,} with {name}" for name, n in partly)])

    def _suspicious(self) -> Iterator[str]:
        """What may be right, and is worth a look."""
        without = len(self._labels) - len(self._completions)
        if without:
            yield f"{without:,} documents have no label: nothing of them is learned"
        if self._useless:
            yield f"{self._useless:,} documents with labels have neither an advantage nor a group"
        if self._unscored:
            yield f"{self._unscored:,} documents of groups have no reward: they are left out"
        if self._sure:
            yield f"{self._sure:,} documents have log-probability 0 at every label: are they known?"
        groups = [group for group in self._groups.values() if not self._advantages]
        for text, is_meant in (
            ("groups have one rollout: its advantage is 0", lambda g: g.size == 1),
            (
                "groups have equal rewards: their advantages are 0",
                lambda g: len(g.rewards) > 1 and len(set(g.rewards)) == 1,
            ),
            (
                "groups have one and the same completion several times over",
                lambda g: g.size > 1 and len(g.completions) == 1,
            ),
        ):
            if count := sum(map(is_meant, groups)):
                yield f"{count:,} of {len(groups):,} {text}"
        repeated = sum(len(ids) > 1 for ids in self._prompts.values())
        if repeated:
            yield f"{repeated:,} prompts have several group ids: their answers are not compared"
        for (above, below), ratio in self._ratios.items():
            if ratio.far:
                yield f"{ratio.far:,} labels have a ratio {above} / {below} beyond 1/2 and 2"
        longest = max(self._completions, default=0)
        cut = self._completions.count(longest)
        is_far = self._completions and longest >= 2 * np.median(self._completions)
        if is_far and cut > max(1, len(self._completions) // 20):
            yield f"{cut:,} documents have the most labels, {longest:,}: were they cut off there?"


def _range(values: Sequence[int]) -> str:
    """Sum, extremes and median of counts."""
    return (
        f"{sum(values):,}, from {min(values):,} to {max(values):,} a document (median "
        f"{int(np.median(values)):,})"
    )


def _spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    deviation = float(np.std(values))
    return f"mean {np.mean(values):.4g}, from {low:.4g} to {high:.4g}, deviation {deviation:.4g}"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
