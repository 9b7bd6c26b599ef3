"""A task of one's own, for examples/my_task.yaml: a word is to be written backwards."""

import random

from fastrl import Problem


class Reversal:
    def __init__(self, seed, length=4, letters="abcdef"):
        self.seed, self.length, self.letters = seed, length, letters

    def problems(self, split):
        rng = random.Random(f"{self.seed}/{split}")
        while True:
            word = "".join(rng.choices(self.letters, k=self.length))
            yield Problem(prompt=f"{word} =", answer=word[::-1])

    def score(self, problem, answer):
        if answer is None:
            return 0.0
        right = sum(a == b for a, b in zip(answer, problem.answer, strict=False))
        return right / max(len(answer), len(problem.answer))
