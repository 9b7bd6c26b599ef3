"""Problems and rewards: tasks of reasoning-gym, scored by the package's own verifiers.

Training and held-out problems come from different seeds, and no prompt is in both.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastrl.config.base import UserError
from fastrl.config.environment import QUESTION, ReasoningGymConfig

_SEED_STRIDE = 2**31
"""From the seed of the held-out problems to that of the training problems. Most tasks make problem
i from seed + i, so nearby seeds would give the same problems; numpy takes seeds up to 2^32."""

_MAX_DRAWS = 4
"""Problems that are drawn for each different held-out prompt that is wanted, at most."""


@dataclass(frozen=True)
class Problem:
    """One problem of an environment.

    Attributes:
        prompt: what the model reads.
        answer: the environment's own, for supervised training; None where a task has none.
        entry: what the verifier needs.
    """

    prompt: str
    answer: str | None
    entry: dict[str, Any]


class ReasoningGymEnvironment:
    """A task of reasoning-gym: training problems, held-out problems, and rewards.

    The held-out prompts are the first `heldout_prompts` different ones of a seed of their own;
    the training prompts are drawn from another seed, without those that are held out and without
    repetition.

    Args:
        config: the task and how its questions become prompts.
        seed: of the run; it gives both problem sets.

    Raises:
        UserError: reasoning-gym is not installed, has no such task, refuses the task's options, or
            has too few different prompts.
    """

    def __init__(self, config: ReasoningGymConfig, seed: int) -> None:
        self._config = config
        self._pattern = re.compile(config.question_pattern or "(.*)", re.DOTALL)
        draws = _MAX_DRAWS * config.heldout_prompts
        first_seed = random.Random(seed).randrange(_SEED_STRIDE)
        self._verifier = _dataset(config, first_seed, draws)
        heldout: dict[str, Problem] = {}
        for problem in self._problems(self._verifier):
            heldout.setdefault(problem.prompt, problem)
            if len(heldout) == config.heldout_prompts:
                break
        else:
            raise UserError(
                f"`environment.heldout_prompts` must be at most {len(heldout)} here, the different "
                f"prompts among {draws} problems of `{config.task}`, got {config.heldout_prompts}"
            )
        train: dict[str, Problem] = {}
        train_set = _dataset(config, first_seed + _SEED_STRIDE, config.train_prompts)
        for problem in self._problems(train_set):
            if problem.prompt not in heldout:
                train.setdefault(problem.prompt, problem)
        if not train:
            raise UserError(
                f"`environment`: all {config.train_prompts} training problems of `{config.task}` "
                "have held-out prompts; lower `heldout_prompts` or make the task's range larger"
            )
        self.heldout = tuple(heldout.values())
        self.train = tuple(train.values())

    def score(self, problem: Problem, answer: str | None) -> float:
        """Returns the verifier's reward of an answer; None is a completion that did not end.

        An answer that the verifier cannot parse counts as none, too.
        """
        if answer is None:
            return float(self._verifier.score_answer(None, problem.entry))
        try:
            return float(self._verifier.score_answer(answer.strip(), problem.entry))
        except Exception:  # some tasks parse without a guard, and with whatever parser
            return self.score(problem, None)

    def _problems(self, dataset: Any) -> Iterator[Problem]:
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
