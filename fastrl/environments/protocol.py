"""What an environment is: problems by split, and a score for each answer."""

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
        answer: the environment's own, for supervised training; None where there is none.
        data: what `score` needs beside them; anything that can be pickled.

    Raises:
        TypeError: a prompt or answer that is no text.
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
    """A task: a class of one's own with these methods serves as `environment: {type: python}`.

    It is made by `Class(seed=seed, **config)` with the run's seed and `environment.config`.

    Which problems are held out is not its concern: those drawn first for "heldout" are, and a
    training problem with one of their prompts is left out, as is one whose prompt came before. So
    `problems` may yield the same for both splits, for ever, or with repetitions.
    """

    def problems(self, split: Split) -> Iterable[Problem]:
        """Problems for training ("train") or evaluation ("heldout"), the same at each call."""
        ...

    def score(self, problem: Problem, answer: str | None) -> float:
        """The reward of a completion; 1 or more counts as solved.

        Args:
            problem: one of the environment's own.
            answer: text of the completion without its end token; None for one that did not end.
        """
        ...
