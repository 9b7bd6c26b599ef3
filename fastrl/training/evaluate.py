"""The reward on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from fastrl.config.training import RunConfig
from fastrl.training.context import RunContext
from fastrl.training.order import seeded
from fastrl.training.sampled_rollouts import scored


@dataclass(frozen=True)
class Evaluation:
    """Rewards of completions of the held-out prompts.

    Attributes:
        reward: mean over all completions.
        solved: share of completions with the full reward of 1.
        finished: share of completions that ended.
        scoring: numbers of completions that could not be scored, by reason.
    """

    reward: float
    solved: float
    finished: float
    scoring: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The numbers by their names in metrics.jsonl."""
        return {
            "heldout/reward": self.reward,
            "heldout/solved": self.solved,
            "heldout/finished": self.finished,
            **{f"heldout/{name}": value for name, value in self.scoring.items()},
        }


def evaluate(config: RunConfig, context: RunContext) -> Evaluation:
    """The scores of completions of all held-out prompts, sampled from the same seed each time."""
    assert context.environment is not None
    problems = context.environment.heldout
    context.generator.manual_seed(seeded(config.seed, "evaluation").getrandbits(63))
    groups = context.sampler.sample(
        [context.tokenizer.encode(problem.prompt) for problem in problems],
        num_each=config.evaluation.samples_per_prompt,
        temperature=config.evaluation.temperature,
    )
    samples, scoring = scored(groups, problems, context.environment, context.tokenizer)
    return Evaluation(
        reward=fmean(sample.reward for sample in samples),
        solved=fmean(sample.reward >= 1.0 for sample in samples),
        finished=fmean(sample.finished for sample in samples),
        scoring=scoring,
    )
