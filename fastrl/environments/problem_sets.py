"""The problem sets of a run: held-out and training problems, which share no prompt or answer."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from itertools import islice

from fastrl.config.base import UserError
from fastrl.config.environment import AnyEnvironmentConfig
from fastrl.environments.protocol import Environment, Problem

MAX_DRAWS = 4
"""Most problems to draw for each held-out prompt, as prompts may repeat."""


@dataclass(frozen=True)
class ProblemSets:
    """Problems with different prompts; no prompt is in both sets."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all prompts and answers, in order."""
        texts = [(problem.prompt, problem.answer) for problem in (*self.heldout, *self.train)]
        return sha256(repr(texts).encode()).hexdigest()


def draw_problem_sets(config: AnyEnvironmentConfig, environment: Environment) -> ProblemSets:
    """The first `heldout_prompts` different prompts held out, and all other training prompts.

    Args:
        config: how many problems to draw.
        environment: where they come from.

    Raises:
        UserError: too few different prompts.
    """
    most = MAX_DRAWS * config.heldout_prompts
    heldout: dict[str, Problem] = {}
    drawn = []
    for problem in islice(environment.problems("heldout"), most):
        drawn.append(problem)
        heldout.setdefault(problem.prompt, problem)
        if len(heldout) == config.heldout_prompts:
            break
    else:
        raise UserError(
            f"`environment.heldout_prompts` must be at most {len(heldout)} here, the different "
            f"prompts among {len(drawn)} problems of `{config.label}`, got {config.heldout_prompts}"
        )
    answers = {_answer(config, problem) for problem in heldout.values()} - {None}
    train: dict[str, Problem] = {}
    drawn = list(islice(environment.problems("train"), config.train_prompts))
    for problem in drawn:
        if problem.prompt not in heldout and _answer(config, problem) not in answers:
            train.setdefault(problem.prompt, problem)
    if not train:
        shared = "prompts" if config.disjoint == "prompts" else "prompts or answers"
        raise UserError(
            f"`environment`: all {len(drawn)} training problems of `{config.label}` have held-out "
            f"{shared}; lower `heldout_prompts` or make the task's range larger"
        )
    return ProblemSets(tuple(train.values()), tuple(heldout.values()))


def _answer(config: AnyEnvironmentConfig, problem: Problem) -> str | None:
    """What of an answer must not be in both sets; None where that does not matter."""
    if config.disjoint == "prompts":
        return None
    if problem.answer is None:
        raise UserError(
            f"`environment.disjoint: {config.disjoint}` needs the answer of every problem, but "
            f"`{config.label}` gives none for {problem.prompt!r}; use `prompts`"
        )
    is_whole = config.disjoint == "answers"
    return problem.answer if is_whole else "".join(sorted(problem.answer))
