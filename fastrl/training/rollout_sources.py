"""Where phases get their documents: the environment's answers, the sampler, or rollout files.

All are built and checked before the run begins, each once. The documents of later phases are thus
in memory from the start; those of a rollout file that several phases read are there once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

from fastrl.config.base import UserError
from fastrl.config.phases import (
    AdvantageConfig,
    FileRolloutsConfig,
    OverlongShapingConfig,
    SamplerRolloutsConfig,
    SupervisedPhaseConfig,
)
from fastrl.config.training import RunConfig
from fastrl.data.advantages import (
    group_advantages,
    with_group_advantages,
    without_labels,
    without_zero_groups,
)
from fastrl.data.columns import BATCH_COLUMNS
from fastrl.data.documents import Document
from fastrl.data.prompt_groups import group_by_prompt, group_over_files
from fastrl.data.reward_shaping import completion_length, overlong_punishment
from fastrl.data.rollouts import check_any_learned, check_same_columns, read_rollouts
from fastrl.environments.protocol import Problem
from fastrl.training.context import RunContext
from fastrl.training.environment import RunEnvironment
from fastrl.training.order import ShuffledItems
from fastrl.training.sampler import Completion, Sampler
from fastrl.training.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One completion as a person reads it."""

    prompt: str
    completion: str
    reward: float
    finished: bool


@dataclass(frozen=True)
class Rollouts:
    """The documents of a step, with advantages.

    Attributes:
        documents: those that teach something; groups dropped for equal rewards are left out.
        metrics: of all completions of the step.
        samples: some of the completions; none from files.
    """

    documents: list[Document]
    metrics: dict[str, float]
    samples: list[Sample]


class RolloutSource(Protocol):
    """A source of documents, step after step.

    Attributes:
        items: what steps are made of; their position goes into a checkpoint.
        longest: most tokens that a document can have.
    """

    items: ShuffledItems[Any]
    longest: int

    def next(self) -> Rollouts:
        """The documents of the next step."""
        ...


class SupervisedDocuments:
    """Training prompts with the environment's answers, in random order.

    Raises:
        UserError: a problem has no answer, or holds a character that the tokenizer lacks.
    """

    def __init__(self, config: SupervisedPhaseConfig, context: RunContext, seed: str) -> None:
        assert context.environment is not None
        tokenizer = context.tokenizer
        documents = []
        for problem in context.environment.train:
            if problem.answer is None:
                raise UserError(
                    "a supervised phase needs answers, but the environment gives none for "
                    f"{problem.prompt!r}; leave the phase out"
                )
            prompt = tokenizer.encode(problem.prompt)
            answer = [*tokenizer.encode(problem.answer), tokenizer.end_token]
            documents.append(Document(tokens=prompt + answer, prompt_length=len(prompt)))
        self._number = config.documents_per_step
        self.items = ShuffledItems(documents, seed)
        self.longest = max(len(document.tokens) for document in documents)

    def next(self) -> Rollouts:
        return Rollouts(self.items.take(self._number), {}, [])


class SampledRollouts:
    """Rollouts of the model that is trained, on training problems in random order.

    Args:
        config: numbers and temperature.
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
        self._config = config
        self._advantage = advantage
        self._environment = environment
        self._tokenizer = tokenizer
        self._sampler = sampler
        prompts = [(problem, tokenizer.encode(problem.prompt)) for problem in environment.train]
        self.items = ShuffledItems(prompts, seed)
        self.longest = max(len(prompt) for _, prompt in prompts) + sampler.config.max_new_tokens

    def next(self) -> Rollouts:
        """A group of completions for each of the next problems."""
        config = self._config
        taken = self.items.take(config.prompts_per_step)
        problems, prompts = [problem for problem, _ in taken], [prompt for _, prompt in taken]
        groups = self._sampler.sample(
            prompts, num_each=config.group_size, temperature=config.temperature
        )
        samples, score_metrics = scored(groups, problems, self._environment, self._tokenizer)
        completions = [completion for group in groups for completion in group]
        lengths = [len(completion.tokens) for completion in completions]
        punishments = _punishments(
            lengths, self._advantage.shaping, self._sampler.config.max_new_tokens
        )
        numbers = [number for number, group in enumerate(groups) for _ in group]
        advantages = group_advantages(
            [s.reward + punishment for s, punishment in zip(samples, punishments, strict=True)],
            numbers,
            baseline=self._advantage.baseline,
            scale=self._advantage.scale,
        )
        documents = [
            Document(
                tokens=prompts[number] + completion.tokens,
                prompt_length=len(prompts[number]),
                logprobs=completion.logprobs,
                rollout_logprobs=completion.logprobs,
                advantage=advantage,
                temperature=config.temperature,
                reward=sample.reward,
                group_id=number,
            )
            for number, completion, sample, advantage in zip(
                numbers, completions, samples, advantages, strict=True
            )
        ]
        if self._advantage.truncated == "drop":
            documents = [
                document if completion.finished else without_labels(document)
                for document, completion in zip(documents, completions, strict=True)
            ]
        metrics = {
            "completion_length": fmean(lengths),
            "finished": fmean(sample.finished for sample in samples),
            "sampled_tokens": float(sum(lengths)),
            **score_metrics,
            **_punishment_metrics(punishments, self._advantage.shaping),
        }
        # The first completion of as many problems.
        shown = samples[:: config.group_size]
        return _rollouts(documents, self._advantage, metrics, shown)


class RolloutFiles:
    """The documents of rollout files; a file is read and checked once for all phases of a run.

    Args:
        vocab_size: of the model; ids must be below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._read: dict[Hashable, list[Document]] = {}

    def documents(
        self, path: str, require: tuple[str, ...], config: FileRolloutsConfig
    ) -> list[Document]:
        """The documents of a file, the same ones for the same requirements.

        Args:
            path: of the file.
            require: fields that every document must have.
            config: which columns make the reward and which are not read.

        Raises:
            UserError: a file that cannot be read or lacks something, an id outside of the
                vocabulary.
        """
        key = (path, require, config.ignore, tuple(config.reward_columns.items()))
        if key not in self._read:
            self._read[key] = documents = []
            for document in read_rollouts(
                path, require=require, ignore=config.ignore, reward_columns=config.reward_columns
            ):
                documents.append(document)
                largest = max(document.tokens)
                if largest >= self._vocab_size:
                    raise UserError(
                        f"{path}, document {len(documents)}: `tokens` must be ids below the "
                        f"vocabulary size {self._vocab_size}, got {largest}"
                    )
        return self._read[key]


class FileRollouts:
    """Rollouts from files, whole groups in random order.

    Args:
        config: files and documents a step.
        advantage: from rewards to advantages, where a document has none of its own.
        columns: of the batch that the losses and the head need, and so the files must have.
        files: of the run.
        seed: of the order of groups.

    Raises:
        UserError: as `RolloutFiles.documents`; no documents, or a column that only some have.
    """

    def __init__(
        self,
        config: FileRolloutsConfig,
        advantage: AdvantageConfig,
        columns: Collection[str],
        files: RolloutFiles,
        seed: str,
    ) -> None:
        self._config = config
        self._advantage = advantage
        read: list[list[Document]] = []
        named: list[tuple[str, Document]] = []
        require = tuple(field for column, field in BATCH_COLUMNS.items() if column in columns)
        for path in config.paths:
            documents = files.documents(path, require, config)
            read.append(documents)
            for number, document in enumerate(documents, start=1):
                named.append((f"{path}, document {number}", document))
        if not named:
            raise UserError(f"{', '.join(config.paths)}: no documents")
        if "kept_tokens" in columns:
            for where, document in named:
                if document.kept_tokens is None:
                    raise UserError(
                        f"{where}: `kept_tokens` is required with `model.head.keep.recorded: true`,"
                        " got none"
                    )
        check_same_columns(named)
        check_any_learned(config.paths, (document for _, document in named))
        if advantage.shaping is not None and all(doc.advantage is not None for _, doc in named):
            raise UserError(
                f"`advantage.shaping` must not be given, as all documents of "
                f"{', '.join(config.paths)} have advantages of their own, which it does not change"
            )
        self.items = ShuffledItems(group_over_files(read), seed)
        self.longest = max(len(document.tokens) for _, document in named)

    def next(self) -> Rollouts:
        """As many groups as give the step its documents."""
        documents: list[Document] = []
        number = 0
        while len(documents) < self._config.documents_per_step:
            (group,) = self.items.take(1)
            documents += [replace(document, group_id=number) for document in group]
            number += 1
        given = [document for document in documents if document.advantage is not None]
        rewarded = [document for document in documents if document.advantage is None]
        shaping = self._advantage.shaping
        punishments = _punishments([completion_length(document) for document in rewarded], shaping)
        relative = with_group_advantages(
            [
                document
                if document.reward is None
                else replace(document, reward=document.reward + punishment)
                for document, punishment in zip(rewarded, punishments, strict=True)
            ],
            baseline=self._advantage.baseline,
            scale=self._advantage.scale,
        )
        result = [
            replace(shaped, reward=document.reward)
            for shaped, document in zip(relative, rewarded, strict=True)
        ]
        metrics = _punishment_metrics(punishments, shaping)
        return _rollouts([*given, *result], self._advantage, metrics, [])


def _punishments(
    lengths: Sequence[int], shaping: OverlongShapingConfig | None, max_new_tokens: int | None = None
) -> list[float]:
    """What is added to the rewards of completions of so many tokens."""
    if shaping is None:
        return [0.0] * len(lengths)
    max_length, cache_length = shaping.resolved(max_new_tokens)
    return [
        overlong_punishment(length, max_length=max_length, cache_length=cache_length)
        for length in lengths
    ]


def _punishment_metrics(
    punishments: Sequence[float], shaping: OverlongShapingConfig | None
) -> dict[str, float]:
    return {"overlong_punishment": fmean(punishments)} if shaping and punishments else {}


def scored(
    groups: Sequence[Sequence[Completion]],
    problems: Sequence[Problem],
    environment: RunEnvironment,
    tokenizer: Tokenizer,
) -> tuple[list[Sample], dict[str, float]]:
    """The completions of each problem as text with their rewards, and the scoring's metrics."""
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


def split_groups(documents: list[Document], parts: int) -> list[list[Document]]:
    """Splits documents into at most `parts` lists of as many groups, each group in one of them."""
    whole = group_by_prompt(documents)
    bounds = [len(whole) * part // parts for part in range(parts + 1)]
    split = [whole[start:stop] for start, stop in itertools.pairwise(bounds)]
    return [[document for group in part for document in group] for part in split if part]


def _rollouts(
    documents: list[Document],
    config: AdvantageConfig,
    metrics: dict[str, float],
    samples: list[Sample],
) -> Rollouts:
    """Leaves out what teaches nothing: documents without labels, and groups as `config` says."""
    rewards = [document.reward for document in documents if document.reward is not None]
    if rewards:
        metrics = {"reward": fmean(rewards), **metrics}
    labelled = [document for document in documents if document.has_labels]
    active = [document for document in without_zero_groups(labelled) if document.has_labels]
    metrics["active_groups"] = len(group_by_prompt(active)) / len(group_by_prompt(documents))
    return Rollouts(active if config.zero_variance == "drop" else labelled, metrics, samples)


def build_sources(
    config: RunConfig, context: RunContext, first: int = 0
) -> dict[int, RolloutSource]:
    """The sources of the phases from `first` on, by the number of the phase, all of them checked.

    Raises:
        UserError: rollout files that cannot be used, problems without what a phase needs, or
            documents that can be longer than a micro-batch.
    """
    vocab_size = context.llama.config.vocab_size
    assert vocab_size is not None
    files = RolloutFiles(vocab_size)
    sources = {}
    for index in range(first, len(config.phases)):
        sources[index] = source = _source(config, index, context, files)
        most = config.phases[index].max_tokens_per_micro_batch
        if source.longest > most:
            raise UserError(
                f"`phases.{index}.max_tokens_per_micro_batch` must be at least {source.longest}, "
                f"the most tokens that a document of this phase can have, got {most}"
            )
    return sources


def _source(
    config: RunConfig, index: int, context: RunContext, files: RolloutFiles
) -> RolloutSource:
    phase, seed = config.phases[index], phase_seed(config, index)
    if isinstance(phase, SupervisedPhaseConfig):
        return SupervisedDocuments(phase, context, seed)
    if isinstance(phase.rollouts, FileRolloutsConfig):
        columns = config.required_columns(phase)
        return FileRollouts(phase.rollouts, phase.advantage, columns, files, seed)
    assert context.environment is not None
    return SampledRollouts(
        phase.rollouts,
        phase.advantage,
        context.environment,
        context.tokenizer,
        context.sampler,
        seed,
    )


def phase_seed(config: RunConfig, index: int) -> str:
    """What the random numbers of a phase follow from."""
    return f"{config.seed}/phases/{index}"
