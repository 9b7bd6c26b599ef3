"""The environment of a run: its problem sets, and the rewards of a step's completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastrl.config.environment import AnyEnvironmentConfig
from fastrl.environments.problem_sets import draw_problem_sets
from fastrl.environments.protocol import Problem
from fastrl.environments.scoring import build_environment, finite_score


@dataclass(frozen=True)
class Scores:
    """Rewards of completions.

    Attributes:
        rewards: of the completions, in order.
        metrics: how many of them could not be scored, by name.
    """

    rewards: list[float]
    metrics: dict[str, float]


class RunEnvironment:
    """Problems of an environment and their rewards.

    Args:
        config: of the environment.
        seed: of the run.

    Attributes:
        train: problems for training.
        heldout: problems for evaluation; no prompt is in both.

    Raises:
        UserError: what the config asks for is not there, fails, or has too few different prompts.
    """

    def __init__(self, config: AnyEnvironmentConfig, seed: int) -> None:
        self._environment = build_environment(config, seed)
        problems = draw_problem_sets(config, self._environment)
        self.train = problems.train
        self.heldout = problems.heldout

    def score(self, problems: Sequence[Problem], answers: Sequence[str | None]) -> Scores:
        """The rewards of answers, one a problem; None is a completion that did not end.

        An answer at which the environment fails counts as none, and in `score_errors`.
        """
        rewards, errors = [], 0
        for problem, answer in zip(problems, answers, strict=True):
            try:
                reward = finite_score(self._environment, problem, answer)
            except Exception:  # some verifiers parse without a guard, and with whatever parser
                errors += 1
                reward = finite_score(self._environment, problem, None)
            rewards.append(reward)
        return Scores(rewards, {"score_errors": float(errors)})
