"""The reward on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from fastrl.config.environment import EvaluationConfig
from fastrl.training.environment import RunEnvironment
from fastrl.training.sampled_rollouts import scored
from fastrl.training.sampler import Sampler
from fastrl.training.tokenizer import Tokenizer


@dataclass(frozen=True)
class Evaluation:
    """Rewards of completions of the held-out prompts.

    Attributes:
        reward: mean over all completions.
        solved: share of completions with the full reward of 1.
        finished: share of completions that ended.
        scoring: how many completions could not be scored, by name.
    """

    reward: float
    solved: float
    finished: float
    scoring: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The numbers by their names in the metrics file."""
        return {
            "heldout/reward": self.reward,
            "heldout/solved": self.solved,
            "heldout/finished": self.finished,
            **{f"heldout/{name}": value for name, value in self.scoring.items()},
        }


def evaluate(
    config: EvaluationConfig,
    environment: RunEnvironment,
    tokenizer: Tokenizer,
    sampler: Sampler,
) -> Evaluation:
    """The scores of freshly sampled completions of all held-out prompts."""
    problems = environment.heldout
    groups = sampler.sample(
        [tokenizer.encode(problem.prompt) for problem in problems],
        num_each=config.samples_per_prompt,
        temperature=config.temperature,
    )
    samples, scoring = scored(groups, problems, environment, tokenizer)
    return Evaluation(
        reward=fmean(sample.reward for sample in samples),
        solved=fmean(sample.reward >= 1.0 for sample in samples),
        finished=fmean(sample.finished for sample in samples),
        scoring=scoring,
    )
