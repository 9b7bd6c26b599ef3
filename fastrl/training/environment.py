"""The environment of a run: its problem sets, and the rewards of a step's completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastrl.config.base import UserError
from fastrl.config.environment import AnyEnvironmentConfig
from fastrl.environments.pool import Outcomes, ScoringPool
from fastrl.environments.problem_sets import draw_problem_sets
from fastrl.environments.protocol import Problem
from fastrl.environments.scoring import build_environment
from fastrl.training.processes import Processes


@dataclass(frozen=True)
class Scores:
    """Rewards of completions.

    Attributes:
        rewards: of the completions, in order.
        metrics: numbers of those that count as no answer, by reason.
    """

    rewards: list[float]
    metrics: dict[str, float]


class RunEnvironment:
    """Problems of an environment, and workers that score completions of them.

    Args:
        config: of the environment.
        seed: of the run.
        processes: that share the scoring; default: this process alone.
        launch: whether a worker starts at once, while problems are drawn; otherwise with the first
            completion to score.

    Attributes:
        train: problems for training.
        heldout: problems for evaluation; no prompt is in both.
        digest: of both, to see that a run goes on with the problems it began with.

    Raises:
        UserError: the environment is not available, fails, or has too few different prompts.
    """

    def __init__(
        self,
        config: AnyEnvironmentConfig,
        seed: int,
        processes: Processes | None = None,
        *,
        launch: bool = False,
    ) -> None:
        self._pool = ScoringPool(config, seed)
        if launch:
            self._pool.launch()
        problems = draw_problem_sets(config, build_environment(config, seed))
        self.train = problems.train
        self.heldout = problems.heldout
        self.digest = problems.digest
        self._processes = processes
        if processes is not None and len(set(processes.gather(self.digest))) > 1:
            raise UserError(
                f"{config.label}: `problems` must give the same problems in the same order on all "
                "processes, but they differ; draw them from `seed` alone, and order sets"
            )
        self._pool.set_probe(problems.heldout[0])

    def start(self) -> None:
        """Waits for a worker, such that scoring errors are raised before the run begins.

        Raises:
            UserError: the environment cannot be made in a worker, or cannot score.
        """
        self._pool.start()

    def close(self) -> None:
        self._pool.close()

    def score(self, problems: Sequence[Problem], answers: Sequence[str | None]) -> Scores:
        """The rewards of answers, one a problem; None is a completion that did not end.

        An answer that cannot be scored counts as None and in a metric: `score_errors` if the
        environment failed, `score_timeouts` if it took too long, `score_failures` if the worker
        died. Each process scores a share and gets all rewards; all must call.

        Raises:
            UserError: as `ScoringPool.score`; on all processes if on one.
        """
        size, rank = (self._processes.size, self._processes.rank) if self._processes else (1, 0)
        mine: Outcomes | UserError
        try:
            mine = self._pool.score(problems[rank::size], answers[rank::size])
        except UserError as error:
            mine = error  # the others wait for a share
        rewards = [0.0] * len(answers)
        metrics = dict.fromkeys(("score_errors", "score_timeouts", "score_failures"), 0.0)
        for number, share in enumerate(self._processes.gather(mine) if self._processes else [mine]):
            if isinstance(share, UserError):
                raise share
            rewards[number::size] = share.rewards
            metrics["score_errors"] += len(share.errors)
            metrics["score_timeouts"] += len(share.timeouts)
            metrics["score_failures"] += len(share.failures)
        return Scores(rewards, metrics)
