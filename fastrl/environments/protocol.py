"""The interface of an environment: problems of two splits, and the reward of a completion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Problem:
    """One problem of an environment.

    Attributes:
        prompt: what the model reads.
        answer: the reference answer, for supervised training; None where there is none.
        data: whatever else `score` needs; it must be picklable.

    Raises:
        TypeError: the prompt or the answer is not text.
    """

    prompt: str
    answer: str | None = None
    data: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise TypeError(f"`Problem.prompt` must be text, got {self.prompt!r}")
        if not isinstance(self.answer, str | None):
            raise TypeError(f"`Problem.answer` must be text or None, got {self.answer!r}")


class Environment(Protocol):
    """A task. Any class with these methods serves as `environment: {type: python}`.

    It is constructed as `Class(seed=seed, **config)`, with the run's seed and `environment.config`.

    The splits need not be disjoint. The first different prompts of "heldout" are the held-out ones;
    a training problem with one of these prompts, or with a prompt that came before, is dropped. So
    `problems` may yield the same problems for both splits, repeat them, or never end.
    """

    def problems(self, split: Split) -> Iterable[Problem]:
        """Problems for training ("train") or evaluation ("heldout"), the same on each call."""
        ...

    def score(self, problem: Problem, answer: str | None) -> float:
        """The reward of a completion; 1 or more counts as solved.

        Args:
            problem: one that `problems` gave.
            answer: text of the completion without its end token; None if it did not end.
        """
        ...
