"""A task without an answer: prompts of one length and rewards by lot, for `benchmarks.sampler`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from fastrl import Problem


class Draw:
    """Random letters; half of the completions, whatever they are, get a reward."""

    def __init__(self, seed: int, length: int) -> None:
        self.seed, self.length = seed, length

    def problems(self, split: Literal["train", "heldout"]) -> Iterator[Problem]:
        rng = random.Random(f"{self.seed}/{split}")
        while True:
            yield Problem("".join(rng.choices("abcdefgh", k=self.length)), answer=None, data=None)

    def score(self, problem: Problem, answer: str | None) -> float:
        return float(random.random() < 0.5)
