"""From a config to its environment, and from a completion to a finite reward."""

from __future__ import annotations

import math

from fastrl.config.environment import AnyEnvironmentConfig, PythonEnvironmentConfig
from fastrl.environments.protocol import Environment, Problem
from fastrl.environments.reasoning_gym import ReasoningGymEnvironment
from fastrl.environments.user_class import UserEnvironment


def build_environment(config: AnyEnvironmentConfig, seed: int) -> Environment:
    """The environment of a config.

    Raises:
        UserError: as the constructor of the environment.
    """
    if isinstance(config, PythonEnvironmentConfig):
        return UserEnvironment(config, seed)
    return ReasoningGymEnvironment(config, seed)


def finite_score(environment: Environment, problem: Problem, answer: str | None) -> float:
    """The reward of a completion, a finite number; exceptions of the environment pass through.

    Raises:
        TypeError: the score is not a number.
        ValueError: the score is not finite.
    """
    score = environment.score(problem, answer)
    if isinstance(score, str | bytes) or not hasattr(score, "__float__"):
        raise TypeError(f"`score` must return a number, got {score!r}")
    if not math.isfinite(score):
        raise ValueError(f"`score` must return a finite number, got {score!r}")
    return float(score)
