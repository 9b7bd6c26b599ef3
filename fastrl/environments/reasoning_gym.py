"""Tasks of the reasoning-gym package, scored by its own verifiers."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator
from typing import Any

from fastrl.config.base import UserError
from fastrl.config.environment import QUESTION, ReasoningGymConfig
from fastrl.environments.problem_sets import MAX_DRAWS
from fastrl.environments.protocol import Problem, Split

_SEED_STRIDE = 2**31
"""Distance between the seeds of held-out and training problems. Most tasks make problem i from
seed + i, so nearby seeds would share problems; numpy takes seeds below 2^32."""


class ReasoningGymEnvironment:
    """A task of reasoning-gym.

    Training and held-out problems come from different seeds.

    Args:
        config: the task and how its questions become prompts.
        seed: of the run; the seeds of both splits follow from it.

    Raises:
        UserError: reasoning-gym is not installed, has no such task, or refuses the task's options.
    """

    def __init__(self, config: ReasoningGymConfig, seed: int) -> None:
        self._config = config
        self._pattern = re.compile(config.question_pattern or "(.*)", re.DOTALL)
        self._seed = random.Random(seed).randrange(_SEED_STRIDE)
        # Its verifier scores problems of both splits.
        self._heldout = _dataset(config, self._seed, MAX_DRAWS * config.heldout_prompts)

    def problems(self, split: Split) -> Iterator[Problem]:
        """The task's problems, as many as the run may draw.

        Raises:
            UserError: `question_pattern` is not found in a question.
        """
        dataset = self._heldout
        if split == "train":
            seed = self._seed + _SEED_STRIDE
            dataset = _dataset(self._config, seed, self._config.train_prompts)
        for index in range(len(dataset)):
            entry = dataset[index]
            found = self._pattern.search(entry["question"])
            if found is None:
                raise UserError(
                    "`environment.question_pattern` must be found in every question, but is not in "
                    f"{entry['question']!r}"
                )
            prompt = self._config.prompt.replace(QUESTION, found.group(1))
            answer = entry["answer"]
            yield Problem(prompt, None if answer is None else str(answer), entry)

    def score(self, problem: Problem, answer: str | None) -> float:
        """The verifier's reward of the answer, stripped of surrounding spaces.

        Exceptions of the verifier pass through: some tasks parse without a guard.
        """
        answer = None if answer is None else answer.strip()
        return float(self._heldout.score_answer(answer, problem.data))


def _dataset(config: ReasoningGymConfig, seed: int, size: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            "`environment.type: reasoning_gym` needs the reasoning-gym package; install it with: "
            "pip install 'fastrl[examples]'"
        ) from error
    if config.task not in DATASETS:
        near = difflib.get_close_matches(config.task, DATASETS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"its tasks are {', '.join(DATASETS)}"
        raise UserError(f"`environment.task`: reasoning-gym has no task `{config.task}`; {hint}")
    try:
        return reasoning_gym.create_dataset(config.task, seed=seed, size=size, **config.config)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"`environment.config` does not fit the task `{config.task}`: {error}"
        ) from error
