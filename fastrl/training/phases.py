"""One phase of a run, step by step: where documents come from and the updates made on them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from fastrl.config.base import UserError
from fastrl.config.training import (
    FileRolloutsConfig,
    RLPhaseConfig,
    RunConfig,
    SupervisedPhaseConfig,
)
from fastrl.data.batch import BatchCounts, BatchKwargs, TokenBatch
from fastrl.data.documents import Document
from fastrl.data.packing import pack_documents
from fastrl.layers.losses import (
    LanguageModelPolicyGradientLoss,
    add_metrics,
    reduce_metrics,
)
from fastrl.models.llama import Llama
from fastrl.training.checkpoint import TrainerState
from fastrl.training.optimizer import apply_update, build_optimizer
from fastrl.training.order import ShuffledItems, seeded
from fastrl.training.rollouts import (
    FileRollouts,
    Rollouts,
    RolloutSource,
    Sample,
    SampledRollouts,
    required_logprobs,
    split_groups,
)
from fastrl.training.setup import Parts


@dataclass(frozen=True)
class StepResult:
    """What a step gives for the metrics and the display.

    Attributes:
        metrics: finite numbers by name; of several updates the mean.
        num_tokens: tokens that went through forward and backward passes.
        samples: some of the step's completions.
    """

    metrics: dict[str, float]
    num_tokens: int
    samples: list[Sample] = field(default_factory=list)


class SupervisedDocuments:
    """Training prompts with the environment's answers, in random order.

    Raises:
        UserError: a problem has no answer, or holds a character that the tokenizer lacks.
    """

    def __init__(self, config: SupervisedPhaseConfig, parts: Parts, seed: str) -> None:
        assert parts.environment is not None
        tokenizer = parts.tokenizer
        documents = []
        for problem in parts.environment.train:
            if problem.answer is None:
                raise UserError(
                    "a supervised phase needs answers, but the environment gives none for "
                    f"{problem.prompt!r}; leave the phase out"
                )
            prompt = tokenizer.encode(problem.prompt)
            answer = [*tokenizer.encode(problem.answer), tokenizer.end_token]
            documents.append(Document(tokens=prompt + answer, prompt_length=len(prompt)))
        self._number = config.documents_per_step
        self._documents = ShuffledItems(documents, seed)

    @property
    def position(self) -> int:
        """Documents taken so far."""
        return self._documents.position

    @position.setter
    def position(self, position: int) -> None:
        self._documents.position = position

    def next(self) -> Rollouts:
        """Takes the documents of a step."""
        return Rollouts(self._documents.take(self._number), {}, [])


class Phase:
    """A phase that is under way: its optimizer, its documents, its losses in the model's head.

    Args:
        config: of the run.
        index: of the phase.
        parts: model, environment and sampler; the head gets the losses of the phase.

    Attributes:
        name: of the phase.
        steps_done: number of steps made.
        source: of documents.
        optimizer: of the phase.
        reference: the frozen policy of a KL term, the model as the phase began; None without one.

    Raises:
        UserError: rollout files that cannot be used, or problems without what the phase needs.
    """

    def __init__(self, config: RunConfig, index: int, parts: Parts) -> None:
        self.config = config.phases[index]
        self.name = config.phase_name(index)
        self.steps_done = 0
        self._parts = parts
        self._seed = _seed(config, index)
        losses = config.losses_of(self.config)
        self.source = build_source(config, index, parts)
        parts.llama.lm_head.set_losses(losses)
        self.optimizer = build_optimizer(parts.llama, self.config.optimizer)
        self.reference: Llama | None = None
        samples = isinstance(self.source, SampledRollouts)
        if samples and "ref_logprobs" in required_logprobs(losses.values()):
            self.reference = copy.deepcopy(parts.llama).requires_grad_(False).eval()
        self._recomputes_old = (
            isinstance(self.config, RLPhaseConfig)
            and self.config.rollouts.type == "sampler"
            and self.config.rollouts.old_logprobs == "recompute"
        )

    def restore(self, state: TrainerState) -> None:
        """Goes on where a checkpoint of this phase was written; the weights are loaded already."""
        assert state.optimizer is not None
        self.steps_done = state.phase_step
        self.source.position = state.position
        self.optimizer.load_state_dict(state.optimizer)
        for name, loss in self._policy_losses().items():
            loss.entropy_bonus.load_state_dict(state.entropy_bonus[name])
        if self.reference is not None:
            assert state.reference is not None
            self.reference.load_state_dict(state.reference)

    def state(self, before: TrainerState) -> TrainerState:
        """Returns the run's state with what `restore` needs of this phase."""
        losses = self._policy_losses()
        return replace(
            before,
            position=self.source.position,
            optimizer=self.optimizer.state_dict(),
            reference=None if self.reference is None else self.reference.state_dict(),
            entropy_bonus={name: loss.entropy_bonus.state_dict() for name, loss in losses.items()},
        )

    def step(self) -> StepResult:
        """Takes the next documents and makes the step's updates.

        Raises:
            UserError: a document that is longer than a micro-batch may be.
        """
        self._parts.generator.manual_seed(seeded(self._seed, self.steps_done).getrandbits(63))
        rollouts = self.source.next()
        mini_batches, epochs = 1, 1
        if isinstance(self.config, RLPhaseConfig):
            mini_batches, epochs = self.config.mini_batches, self.config.epochs
        updates = [
            self._micro_batches(part) for part in split_groups(rollouts.documents, mini_batches)
        ]
        num_updates = self.config.steps * mini_batches * epochs
        number = self.steps_done * mini_batches * epochs
        results = []
        for _ in range(epochs):
            for micro_batches in updates:
                results.append(self._update(micro_batches, number, num_updates))
                number += 1
        self.steps_done += 1
        names = list(results[0]) if results else []
        metrics = {name: fmean(result[name] for result in results) for name in names}
        num_tokens = sum(batch.num_tokens for update in updates for batch in update) * epochs
        return StepResult(rollouts.metrics | metrics, num_tokens, rollouts.samples)

    def _micro_batches(self, documents: Sequence[Document]) -> list[BatchKwargs]:
        """Packs the documents of one update, with the log-probabilities that its losses need."""
        max_tokens = self.config.max_tokens_per_micro_batch
        longest = max(len(document.tokens) for document in documents)
        if longest > max_tokens:
            raise UserError(
                f"`max_tokens_per_micro_batch` must be at least {longest}, the tokens of the "
                f"longest document, got {max_tokens} in phase `{self.name}`"
            )
        packs = pack_documents(documents, max_tokens)
        batches = [TokenBatch.from_documents(pack) for pack in packs]
        counts = BatchCounts.of(batches)
        device = self._parts.device
        kwargs = [
            piece for batch in batches for piece in batch.to_kwargs(counts=counts, device=device)
        ]
        if self._recomputes_old:
            logprobs = evaluated(self._parts.llama, kwargs)
            kwargs = [b.replace(old_logprobs=p) for b, p in zip(kwargs, logprobs, strict=True)]
        if self.reference is not None:
            logprobs = evaluated(self.reference, kwargs)
            kwargs = [b.replace(ref_logprobs=p) for b, p in zip(kwargs, logprobs, strict=True)]
        return kwargs

    def _update(
        self, micro_batches: Sequence[BatchKwargs], number: int, num_updates: int
    ) -> dict[str, float]:
        """Makes one update with the summed gradients of the micro-batches."""
        losses, metrics = [], []
        for batch in micro_batches:
            output = self._parts.llama(batch)
            output.loss.backward()
            losses.append(output.loss.detach())
            metrics.append(output.metrics)
        norm = apply_update(self.optimizer, self.config.optimizer, number, num_updates)
        totals = reduce_metrics(add_metrics(metrics), ())
        values = {"loss": torch.stack(losses).sum(), **totals, "grad_norm": norm}
        # All numbers in one transfer: the one time in an update that the host waits.
        numbers = torch.stack([value.double() for value in values.values()]).tolist()
        result = dict(zip(values, numbers, strict=True))
        self._parts.llama.lm_head.end_step(result)
        return result | {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _policy_losses(self) -> dict[str, LanguageModelPolicyGradientLoss[Any]]:
        return {
            name: loss
            for name, loss in self._parts.llama.lm_head.losses.items()
            if isinstance(loss, LanguageModelPolicyGradientLoss)
        }


@torch.no_grad()
def evaluated(llama: Llama, batches: Sequence[BatchKwargs]) -> list[torch.Tensor]:
    """Returns the log-probabilities [T] of the labels of each batch, under the model as it is."""
    was_training = llama.training
    llama.eval()
    logprobs = [llama(batch).logprobs for batch in batches]
    llama.train(was_training)
    return logprobs


def build_source(config: RunConfig, index: int, parts: Parts) -> RolloutSource:
    """Returns where a phase gets its documents; of files, all is read and checked.

    Raises:
        UserError: as `Phase`.
    """
    phase, seed = config.phases[index], _seed(config, index)
    if isinstance(phase, SupervisedPhaseConfig):
        return SupervisedDocuments(phase, parts, seed)
    if isinstance(phase.rollouts, FileRolloutsConfig):
        vocab_size = parts.llama.config.vocab_size
        assert vocab_size is not None
        losses = list(config.losses_of(phase).values())
        return FileRollouts(phase.rollouts, phase.advantage, losses, vocab_size, seed)
    assert parts.environment is not None
    return SampledRollouts(
        phase.rollouts, phase.advantage, parts.environment, parts.tokenizer, parts.sampler, seed
    )


def _seed(config: RunConfig, index: int) -> str:
    return f"{config.seed}/phases/{index}"
