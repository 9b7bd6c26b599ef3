"""From a phase's config to the source of its documents, checked before the run begins."""

from __future__ import annotations

from fastrl.config.base import UserError
from fastrl.config.phases import FileRolloutsConfig, SupervisedPhaseConfig
from fastrl.config.training import RunConfig
from fastrl.data.documents import Document
from fastrl.training.context import RunContext
from fastrl.training.order import ShuffledItems
from fastrl.training.rollout_sources import FileRollouts, Rollouts, RolloutSource, SampledRollouts


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
        """Takes the documents of a step."""
        return Rollouts(self.items.take(self._number), {}, [])


def build_source(config: RunConfig, index: int, context: RunContext) -> RolloutSource:
    """Returns where a phase gets its documents; of files, all is read and checked.

    Raises:
        UserError: rollout files that cannot be used, problems without what the phase needs, or
            documents that can be longer than a micro-batch.
    """
    source = _source(config, index, context)
    most = config.phases[index].max_tokens_per_micro_batch
    if source.longest > most:
        raise UserError(
            f"`phases.{index}.max_tokens_per_micro_batch` must be at least {source.longest}, the "
            f"most tokens that a document of this phase can have, got {most}"
        )
    return source


def _source(config: RunConfig, index: int, context: RunContext) -> RolloutSource:
    phase, seed = config.phases[index], phase_seed(config, index)
    if isinstance(phase, SupervisedPhaseConfig):
        return SupervisedDocuments(phase, context, seed)
    if isinstance(phase.rollouts, FileRolloutsConfig):
        vocab_size = context.llama.config.vocab_size
        assert vocab_size is not None
        losses = list(config.losses_of(phase).values())
        return FileRollouts(phase.rollouts, phase.advantage, losses, vocab_size, seed)
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
    """Returns what the random numbers of a phase follow from."""
    return f"{config.seed}/phases/{index}"
