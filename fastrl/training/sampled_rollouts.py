"""Completions of training problems: their scores, and the source that samples them itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from fastrl.config.advantages import AdvantageConfig
from fastrl.config.rollouts import SampledRolloutsConfig, SamplerRolloutsConfig
from fastrl.data.advantages import without_labels
from fastrl.data.documents import Document
from fastrl.environments.protocol import Problem
from fastrl.training.advantages import RewardKL, with_advantages
from fastrl.training.draws import Completion
from fastrl.training.environment import RunEnvironment
from fastrl.training.order import ShuffledItems
from fastrl.training.rollouts import Rollouts, RolloutSource, Sample, to_rollouts
from fastrl.training.sampler import Sampler
from fastrl.training.tokenizer import Tokenizer


class ProblemRollouts(RolloutSource):
    """What sources of completions of training problems share: order, scores and documents.

    Args:
        config: numbers of prompts and completions, temperature.
        advantage: from rewards to advantages.
        environment: problems and rewards.
        tokenizer: from prompts to tokens.
        max_new_tokens: of a completion.
        seed: of the order of problems.
    """

    def __init__(
        self,
        config: SampledRolloutsConfig,
        advantage: AdvantageConfig,
        environment: RunEnvironment,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        seed: str,
    ) -> None:
        self._sampled = config
        self._advantage = advantage
        self._environment = environment
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        prompts = [(problem, tokenizer.encode(problem.prompt)) for problem in environment.train]
        self.items = ShuffledItems(prompts, seed)
        self.longest = max(len(prompt) for _, prompt in prompts) + max_new_tokens
        self.digests: Mapping[str, str] = {}

    def _rollouts(
        self,
        taken: Sequence[tuple[Problem, list[int]]],
        groups: Sequence[Sequence[Completion]],
        reward_kl: RewardKL | None,
        *,
        greedy: Sequence[float] | None = None,
        model_version: int | None = None,
    ) -> Rollouts:
        """The step of the completions of each problem, scored by all processes.

        Args:
            taken: problems with their prompts.
            groups: completions of each.
            reward_kl: as in `next`.
            greedy: reward of the most likely answer to each, where it is the baseline.
            model_version: of the weights that sampled, where it is counted.
        """
        prompts = [prompt for _, prompt in taken]
        problems = [problem for problem, _ in taken]
        samples, score_metrics = scored(groups, problems, self._environment, self._tokenizer)
        completions = [completion for group in groups for completion in group]
        numbers = [number for number, group in enumerate(groups) for _ in group]
        documents = [
            Document(
                tokens=prompts[number] + completion.tokens,
                prompt_length=len(prompts[number]),
                logprobs=completion.logprobs,
                rollout_logprobs=completion.logprobs,
                temperature=self._sampled.temperature,
                model_version=model_version,
                reward=sample.reward,
                group_id=number,
                greedy_reward=None if greedy is None else greedy[number],
                sum_squares=completion.sum_squares,
            )
            for number, completion, sample in zip(numbers, completions, samples, strict=True)
        ]
        documents, shaping_metrics = with_advantages(
            documents, self._advantage, self._max_new_tokens, reward_kl=reward_kl
        )
        if self._advantage.truncated == "drop":
            documents = [
                document if completion.finished else without_labels(document)
                for document, completion in zip(documents, completions, strict=True)
            ]
        lengths = [len(completion.tokens) for completion in completions]
        metrics = {
            "completion_length": fmean(lengths),
            "finished": fmean(sample.finished for sample in samples),
            "sampled_tokens": float(sum(lengths)),
            **({} if greedy is None else {"greedy_reward": fmean(greedy)}),
            **score_metrics,
            **shaping_metrics,
        }
        # The first completion of each problem.
        firsts = samples[:: self._sampled.group_size]
        return to_rollouts(documents, self._advantage, metrics, firsts)


class SampledRollouts(ProblemRollouts):
    """Rollouts of the model that is trained, on training problems in random order.

    Args:
        config: numbers of prompts and completions, temperature.
        advantage: from rewards to advantages.
        environment: problems and rewards.
        tokenizer: from prompts to tokens.
        sampler: of the model that is trained.
        seed: of the order of problems.
    """

    def __init__(
        self,
        config: SamplerRolloutsConfig,
        advantage: AdvantageConfig,
        environment: RunEnvironment,
        tokenizer: Tokenizer,
        sampler: Sampler,
        seed: str,
    ) -> None:
        longest = sampler.config.max_new_tokens
        super().__init__(config, advantage, environment, tokenizer, longest, seed)
        self._sampler = sampler

    def next(self, reward_kl: RewardKL | None = None) -> Rollouts:
        """A group of completions for each of the next problems."""
        config = self._sampled
        taken = self.items.take(config.prompts_per_step)
        problems, prompts = [problem for problem, _ in taken], [prompt for _, prompt in taken]
        groups = self._sampler.sample(
            prompts,
            num_each=config.group_size,
            temperature=config.temperature,
            sum_squares=self._advantage.baseline == "optimal_token",
        )
        greedy = self._greedy_rewards(problems, prompts)
        return self._rollouts(taken, groups, reward_kl, greedy=greedy)

    def _greedy_rewards(
        self, problems: Sequence[Problem], prompts: Sequence[Sequence[int]]
    ) -> list[float] | None:
        """The reward of the most likely answer to each problem, where it is the baseline."""
        if self._advantage.baseline != "greedy":
            return None
        groups = self._sampler.sample(prompts, temperature=0)
        samples, _ = scored(groups, problems, self._environment, self._tokenizer)
        return [sample.reward for sample in samples]


def scored(
    groups: Sequence[Sequence[Completion]],
    problems: Sequence[Problem],
    environment: RunEnvironment,
    tokenizer: Tokenizer,
) -> tuple[list[Sample], dict[str, float]]:
    """The completions of all problems as text with their rewards, and the metrics of scoring."""
    pairs = [
        (problem, completion)
        for problem, group in zip(problems, groups, strict=True)
        for completion in group
    ]
    texts = [tokenizer.decode(completion.tokens) for _, completion in pairs]
    scores = environment.score(
        [problem for problem, _ in pairs],
        [
            text if completion.finished else None
            for text, (_, completion) in zip(texts, pairs, strict=True)
        ],
    )
    samples = [
        Sample(problem.prompt, text, reward, completion.finished)
        for (problem, completion), text, reward in zip(pairs, texts, scores.rewards, strict=True)
    ]
    return samples, scores.metrics
