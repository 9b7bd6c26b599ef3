"""Where phases get their documents: the environment's answers, samplers, or rollout files.

Every source is built once and checked before the run begins. The documents of later phases are
thus in memory from the start; a rollout file that several phases read in the
same way is there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastrl.config.base import UserError
from fastrl.config.phases import AnyPhaseConfig, RLPhaseConfig, SupervisedPhaseConfig
from fastrl.config.rollouts import FileRolloutsConfig, ServerRolloutsConfig
from fastrl.config.training import RunConfig
from fastrl.config.transformers_model import TransformersModelConfig
from fastrl.data.documents import Document
from fastrl.layers.losses import build_loss
from fastrl.models.checkpoint import CONFIG_FILE
from fastrl.training.advantages import RewardKL
from fastrl.training.build_model import read_reference_config
from fastrl.training.context import RunContext
from fastrl.training.file_rollouts import FileRollouts, RolloutFiles
from fastrl.training.order import ShuffledItems
from fastrl.training.rollouts import Rollouts, RolloutSource
from fastrl.training.sampled_rollouts import SampledRollouts
from fastrl.training.server_rollouts import ServerRollouts


class SupervisedDocuments(RolloutSource):
    """Training prompts with the environment's answers, in random order.

    Raises:
        UserError: a problem has no answer, or holds what the tokenizer has no token for.
    """

    uses_weights = False

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
            answer = [*tokenizer.encode(problem.answer), tokenizer.end_tokens[0]]
            documents.append(Document(tokens=prompt + answer, prompt_length=len(prompt)))
        self._number = config.documents_per_step
        self.items = ShuffledItems(documents, seed)
        self.longest = max(len(document.tokens) for document in documents)
        self.digests: Mapping[str, str] = {}

    def next(self, reward_kl: RewardKL | None = None) -> Rollouts:
        return Rollouts(self.items.take(self._number), {}, [])


def build_sources(
    config: RunConfig, context: RunContext, first: int = 0
) -> dict[int, RolloutSource]:
    """The sources of the phases from `first` on, by the index of the phase, all of them checked.

    Raises:
        UserError: rollout files that cannot be used, problems without what a phase needs, documents
            that can be longer than a micro-batch or than the model takes, or tokens to be drawn for
            losses that compare them.
    """
    model = context.model.limits
    files = RolloutFiles(model.vocab_size)
    sources = {}
    for index in range(first, len(config.phases)):
        _check_token_sampling(config, index)
        sources[index] = source = _source(config, index, context, files)
        phase = f"phases.{index}"
        _check_reference(config, config.phases[index], model.vocab_size)
        _check_bound(
            f"{phase}.max_tokens_per_micro_batch",
            config.phases[index].max_tokens_per_micro_batch,
            source.longest,
            phase,
        )
        _check_bound(
            "max_position_embeddings` of the `model",
            model.max_position_embeddings,
            source.longest,
            phase,
        )
        _check_bound("sliding_window` of the `model", model.sliding_window, source.longest, phase)
    return sources


def _check_token_sampling(config: RunConfig, index: int) -> None:
    """Refuses to draw tokens for losses whose mean over the draws is another."""
    phase = config.phases[index]
    if not isinstance(phase, RLPhaseConfig) or phase.token_sampling is None:
        return
    for name, loss in config.losses_of(phase).items():
        scope = build_loss(loss).scope
        if scope != "token":
            raise UserError(
                f"`phases.{index}.token_sampling` must go with losses that are sums over single "
                f"tokens, got `{name}: {{type: {loss.type}}}`, which with its options compares the "
                f"tokens of a {scope}; leave one of the two out"
            )


def _check_reference(config: RunConfig, phase: AnyPhaseConfig, vocab_size: int) -> None:
    """Refuses the folder of a reference that cannot be one, before the phase comes."""
    if not isinstance(phase, RLPhaseConfig) or phase.reference is None:
        return
    folder = Path(phase.reference.path)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder}: a reference must be a folder with {CONFIG_FILE}, got none")
    if not isinstance(config.model, TransformersModelConfig):
        read_reference_config(config, folder, vocab_size)


def _check_bound(name: str, bound: int | None, longest: int, phase: str) -> None:
    if bound is not None and longest > bound:
        raise UserError(
            f"`{name}` must be at least {longest}, the most tokens that a document of `{phase}` "
            f"can have, got {bound}"
        )


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
    if isinstance(phase.rollouts, ServerRolloutsConfig):
        return ServerRollouts(phase.rollouts, phase.advantage, context, seed, phase.steps)
    return SampledRollouts(
        phase.rollouts,
        phase.advantage,
        context.environment,
        context.tokenizer,
        context.sampler,
        seed,
    )


def phase_seed(config: RunConfig, index: int) -> str:
    """The seed of a phase's random numbers."""
    return f"{config.seed}/phases/{index}"
