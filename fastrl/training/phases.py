"""One phase of a run: steps, and the updates on their documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fastrl.config.base import UserError
from fastrl.config.phases import RLPhaseConfig
from fastrl.config.rollouts import SampledRolloutsConfig, ServerRolloutsConfig
from fastrl.config.training import RunConfig
from fastrl.data.batch import BatchKwargs, TokenBatch
from fastrl.data.documents import Document
from fastrl.data.equal_batches import with_kept_tokens
from fastrl.data.partition import micro_batches_of_rank
from fastrl.data.step import OptimizerStep
from fastrl.data.token_sampling import with_sampled_tokens
from fastrl.layers.language_model_head import HeadOutput
from fastrl.layers.losses import LanguageModelPolicyGradientLoss
from fastrl.layers.losses.kl import KLCoefficient
from fastrl.parallel import group_rank, group_size
from fastrl.training.advantages import RewardKL
from fastrl.training.build_model import build_reference
from fastrl.training.context import RunContext
from fastrl.training.model import FrozenPolicy
from fastrl.training.optimizer import (
    apply_update,
    build_optimizer,
    load_optimizer,
    optimizer_state,
)
from fastrl.training.order import seeded
from fastrl.training.reference import with_ref_logprobs
from fastrl.training.rollout_sources import phase_seed
from fastrl.training.rollouts import RolloutSource, Sample, split_groups
from fastrl.training.step_metrics import PendingUpdate, combine_updates
from fastrl.training.trainer_state import TrainerState, trained_names


class StepResult:
    """The numbers and samples of a step, for the metrics and the display.

    Args:
        read: gives the first two attributes, once; it waits for the device.
        last: update of the step; None for a step without documents.

    Attributes:
        metrics: numbers by name over the step's updates (`combine_updates`), without those that
            were left out; `skipped_updates` counts them. Waits for the step, as the next one does,
            but not for steps after it.
        skipped_in_a_row: the most updates left out one after another, up to one of this step.
        num_tokens: tokens of the documents that went through forward and backward passes, on all
            processes; tokens that documents share count for each.
        samples: some of the step's completions.
    """

    def __init__(
        self,
        read: Callable[[], tuple[dict[str, float], int]],
        last: PendingUpdate | None,
        num_tokens: int,
        samples: list[Sample],
    ) -> None:
        self._read, self._last = read, last
        self.num_tokens, self.samples = num_tokens, samples

    @property
    def metrics(self) -> dict[str, float]:
        return self._numbers[0]

    @property
    def skipped_in_a_row(self) -> int:
        return self._numbers[1]

    def seconds_after(self, earlier: StepResult) -> float | None:
        """`PendingUpdate.seconds_after` of the last updates."""
        if self._last is None or earlier._last is None:
            return None
        return self._last.seconds_after(earlier._last)

    @cached_property
    def _numbers(self) -> tuple[dict[str, float], int]:
        return self._read()


@dataclass
class MicroBatch:
    """The batch of one forward and backward pass of this process.

    Attributes:
        whole: this process's part of a packed sequence.
        pieces: the same as micro-sequences; empty for a sequence in one piece.
    """

    whole: BatchKwargs
    pieces: tuple[BatchKwargs, ...]


class Phase:
    """A phase in progress: its optimizer, its documents, its losses in the model's head.

    Args:
        config: of the run.
        index: of the phase.
        context: model, environment and sampler; the head takes the losses of the phase.
        source: of the phase's documents, from `build_sources`.

    Attributes:
        name: of the phase.
        steps_done: number of steps made.
        skipped_in_a_row: the last updates whose gradients were not finite, one after another.
        source: of documents.
        optimizer: of the phase.
        reference: the frozen policy of a KL term or of a distillation: a copy of the model at the
            start of the phase, or the model of a folder; None without one.
        reward_kl: what rewards pay for the divergence from the reference; None if nothing.
    """

    def __init__(
        self, config: RunConfig, index: int, context: RunContext, source: RolloutSource
    ) -> None:
        self.config = config.phases[index]
        self.name = config.phase_name(index)
        self.steps_done = 0
        self.skipped_in_a_row = 0
        self._context = context
        self._seed = phase_seed(config, index)
        self.source = source
        context.model.head.set_losses(config.losses_of(self.config))
        self.optimizer = build_optimizer(context.model.module, self.config.optimizer)
        self.reference: FrozenPolicy | None = None
        rollouts = self.config.rollouts if isinstance(self.config, RLPhaseConfig) else None
        samples = isinstance(rollouts, SampledRolloutsConfig)
        if samples and "ref_logprobs" in config.required_columns(self.config):
            self.reference = self._new_reference(config)
        # A folder's stays on the disk.
        is_copy = isinstance(self.config, RLPhaseConfig) and self.config.reference is None
        self._kept_reference = self.reference if is_copy else None
        self.reward_kl = self._build_reward_kl()
        self._counts_versions = isinstance(rollouts, ServerRolloutsConfig)
        self._recomputes_old = (
            isinstance(rollouts, SampledRolloutsConfig)
            and rollouts.old_logprobs == "recompute"
            and not self._are_on_policy(config)
        )

    def _build_reward_kl(self) -> RewardKL | None:
        if not isinstance(self.config, RLPhaseConfig) or self.config.advantage.kl_in_reward is None:
            return None
        config = self.config.advantage.kl_in_reward
        score: Callable[[Sequence[Document]], list[Document]] | None = None
        if self.reference is not None:
            score = partial(
                with_ref_logprobs,
                reference=self.reference,
                model=self._context.model,
                parallel=self._context.processes.config,
                max_tokens=self.config.max_tokens_per_micro_batch,
                device=self._context.device,
            )
        return RewardKL(config, KLCoefficient(config), score)

    @torch.no_grad()
    def restore(self, state: TrainerState) -> None:
        """Resumes from a checkpoint of this phase, whose weights have been loaded.

        Raises:
            UserError: a reference or entropy bonuses that are not those of the phase; nothing has
                been changed then.
        """
        assert state.optimizer is not None
        self._check(state)
        self.steps_done = state.phase_step
        self.skipped_in_a_row = state.skipped_in_a_row
        self.source.items.position = state.position
        names = trained_names(self._context.model.module)
        load_optimizer(self.optimizer, names, state.optimizer)
        for name, loss in self._policy_losses().items():
            loss.entropy_bonus.load_state_dict(state.entropy_bonus[name])
        for name, coefficient in self._kl_coefficients().items():
            coefficient.value = state.kl_coefficients[name]
        if self._kept_reference is not None:
            assert state.reference is not None
            for name, parameter in self._kept_reference.named_parameters():
                parameter.copy_(state.reference[name])

    def _new_reference(self, config: RunConfig) -> FrozenPolicy:
        """The model as it is, or that of the config's folder."""
        model = self._context.model
        if not isinstance(self.config, RLPhaseConfig) or self.config.reference is None:
            return model.frozen_copy()
        folder = Path(self.config.reference.path)
        return build_reference(config, folder, model.limits.vocab_size, self._context.processes)

    def _check(self, state: TrainerState) -> None:
        """Refuses what a checkpoint of this phase cannot hold."""
        if (self._kept_reference is None) != (state.reference is None):
            needs = "no" if self._kept_reference is None else "a"
            raise UserError(f"checkpoint: phase `{self.name}` must have {needs} reference policy")
        losses = self._policy_losses()
        if set(losses) != set(state.entropy_bonus):
            raise UserError(
                f"checkpoint: `entropy_bonus` must be of the losses {sorted(losses)} of phase "
                f"`{self.name}`, is of {sorted(state.entropy_bonus)}"
            )
        for name, loss in losses.items():
            bonus, factor = loss.entropy_bonus, state.entropy_bonus[name]["factor"]
            bounds = [bonus.factor]
            if bonus.adaptive is not None:
                bounds += [bonus.adaptive.low, bonus.adaptive.high]
            if not min(bounds) <= factor <= max(bounds):
                raise UserError(
                    f"checkpoint: `entropy_bonus.{name}.factor` must be from {min(bounds)} to "
                    f"{max(bounds)}, as the config says, got {factor}"
                )

        coefficients = self._kl_coefficients()
        if set(coefficients) != set(state.kl_coefficients):
            raise UserError(
                f"checkpoint: `kl_coefficients` must be of {sorted(coefficients)} of phase "
                f"`{self.name}`, is of {sorted(state.kl_coefficients)}"
            )

    @torch.no_grad()
    def has_finite_weights(self) -> bool:
        """Whether all weights of this rank are finite; waits for the device."""
        shards = [
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in self._context.model.module.parameters()
        ]
        return bool(torch.stack([shard.isfinite().all() for shard in shards]).all())

    def state(self, before: TrainerState) -> TrainerState:
        """The run's state with what `restore` needs; the tensors are those of the phase."""
        losses, reference = self._policy_losses(), self._kept_reference
        names = trained_names(self._context.model.module)
        return replace(
            before,
            position=self.source.items.position,
            optimizer=optimizer_state(self.optimizer, names),
            reference=None if reference is None else dict(reference.named_parameters()),
            entropy_bonus={name: loss.entropy_bonus.state_dict() for name, loss in losses.items()},
            kl_coefficients={name: each.value for name, each in self._kl_coefficients().items()},
            skipped_in_a_row=self.skipped_in_a_row,
        )

    def step(self) -> StepResult:
        """The result of a step: its updates on the next documents.

        The device may still be at work on them. Results are read in the order of their steps.
        """
        seed = seeded(self._seed, self.steps_done).getrandbits(63)
        self._context.generator.manual_seed(seed)
        torch.manual_seed(seed)  # of dropout
        rollouts = self.source.next(self.reward_kl)
        mini_batches, epochs = 1, 1
        if isinstance(self.config, RLPhaseConfig):
            mini_batches, epochs = self.config.mini_batches, self.config.epochs
        # The first update is of the policy that sampled: its log-probabilities are the old ones.
        first_gives_old = self._recomputes_old and self._gives_old(epochs)
        updates = [
            self._prepared(
                part, self._recomputes_old and not (first_gives_old and index == 0), seed
            )
            for index, part in enumerate(split_groups(rollouts.documents, mini_batches))
        ]
        num_updates = self.config.steps * mini_batches * epochs
        number = self.steps_done * mini_batches * epochs
        results = []
        for epoch in range(epochs):
            for index, (step, micro_batches) in enumerate(updates):
                gives_old = first_gives_old and epoch == index == 0
                with _on_policy(self._policy_losses() if gives_old else {}):
                    keeps_old = gives_old and epochs > 1
                    outputs = self._backward(step, micro_batches, return_logprobs=keeps_old)
                if keeps_old:
                    for batch, output in zip(micro_batches, outputs, strict=True):
                        batch.whole = batch.whole.replace(old_logprobs=output.logprobs)
                results.append(self._update(step, outputs, number, num_updates))
                number += 1
        self.steps_done += 1
        num_tokens = sum(len(document.tokens) for document in rollouts.documents) * epochs
        read = partial(self._finish, results, rollouts.metrics)
        last = results[-1] if results else None
        return StepResult(read, last, num_tokens, rollouts.samples)

    def _finish(
        self, updates: Sequence[PendingUpdate], metrics: Mapping[str, float]
    ) -> tuple[dict[str, float], int]:
        """The metrics of a step, and the most of its updates left out in a row."""
        longest, made = 0, []
        for update in updates:
            found = update.metrics
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if found.is_skipped else 0
            longest = max(longest, self.skipped_in_a_row)
            if not found.is_skipped:
                made.append(found)
        skipped = {"skipped_updates": len(updates) - len(made)}
        return {**metrics, **combine_updates(made), **skipped}, longest

    def _prepared(
        self, documents: Sequence[Document], recomputes_old: bool, seed: int
    ) -> tuple[OptimizerStep, list[MicroBatch]]:
        """The packed documents of one update, with the log-probabilities that its losses need."""
        groups, parallel = self._context.model.groups, self._context.processes.config
        shares = isinstance(self.config, RLPhaseConfig) and self.config.share_prefixes
        packs = micro_batches_of_rank(
            documents,
            group_rank(groups.dp),
            group_size(groups.dp),
            self.config.max_tokens_per_micro_batch,
            self._work,
            share_prefixes=shares,
        )
        batches = [TokenBatch.from_documents(pack, share_prefixes=shares) for pack in packs]
        keep = self._context.model.head.config.keep
        if keep is not None and keep.recorded:
            batches = [with_kept_tokens(batch) for batch in batches]
        if isinstance(self.config, RLPhaseConfig) and self.config.token_sampling is not None:
            probability = self.config.token_sampling.probability
            batches = [with_sampled_tokens(batch, probability, seed) for batch in batches]
        step = OptimizerStep(
            batches,
            groups,
            device=self._context.device,
            layout=parallel.sequence_layout,
        )
        result = []
        version = self.steps_done if self._counts_versions else None
        for batch in step.batches:
            (whole,) = step.to_kwargs(batch, parallel.micro_sequences, join=True)
            whole = whole.replace(current_version=version)
            if recomputes_old:
                whole = whole.replace(old_logprobs=self._context.model.logprobs(whole))
            # What rewards pay for has brought the documents the reference's log-probabilities.
            if self.reference is not None and self.reward_kl is None:
                whole = whole.replace(ref_logprobs=self.reference.logprobs(whole))
            is_cut = parallel.micro_sequences > 1
            pieces = step.to_kwargs(batch, parallel.micro_sequences) if is_cut else ()
            pieces = tuple(piece.replace(current_version=version) for piece in pieces)
            result.append(MicroBatch(whole, pieces))
        return step, result

    def _backward(
        self, step: OptimizerStep, micro_batches: Sequence[MicroBatch], *, return_logprobs: bool
    ) -> list[HeadOutput]:
        """The outputs of the micro-batches, whose gradients are summed in the model."""
        model = self._context.model
        outputs = []
        for batch in micro_batches:
            if batch.pieces:
                output = model.backward_in_pieces(batch.pieces, batch.whole)
            else:
                output = model.backward(batch.whole, return_logprobs=return_logprobs)
            step.add(output)
            outputs.append(output)
        return outputs

    def _update(
        self,
        step: OptimizerStep,
        outputs: Sequence[HeadOutput],
        number: int,
        num_updates: int,
    ) -> PendingUpdate:
        """The metrics of one update with the gradients that are in the model."""
        model = self._context.model
        strategies = [output.strategy for output in outputs]
        model.reduce_gradients()
        norm = apply_update(self.optimizer, self.config.optimizer, number, num_updates)
        totals = step.finish(model.head.loss_groups)
        known = {
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "single_pass": strategies.count("single_pass") / len(strategies),
        }
        counts = (step.counts.num_labels_in_batch, step.counts.num_documents_in_batch)
        update = PendingUpdate({**totals, "grad_norm": norm}, counts, known)
        # Only what adapts to an update has the next one wait for its numbers.
        if self._adapts and not update.metrics.is_skipped:
            model.head.end_step(update.metrics.values)
        return update

    @property
    def _adapts(self) -> bool:
        """Whether the losses of an update depend on the numbers of the one before."""
        return any(
            loss.entropy_bonus.adaptive is not None or loss.kl_coefficient.adaptive is not None
            for loss in self._policy_losses().values()
        )

    def _work(self, document: Document, num_shared: int) -> float:
        """Floating-point operations of a document."""
        flops = self._context.model.flops
        return flops.document(len(document.tokens), document.num_labels, num_shared)

    def _gives_old(self, epochs: int) -> bool:
        """Whether the first update's own log-probabilities can stand for those of a pass before it.

        Not at another scale of the logits than that pass has, nor for losses of one's own, which
        may read the batch's. A sequence in pieces gives none, which later epochs would need.
        """
        losses = self._context.model.head.losses.values()
        in_pieces = self._context.processes.config.micro_sequences > 1
        return not (in_pieces and epochs > 1) and all(
            type(loss).__module__.startswith("fastrl.") and loss.config.logits_scale == 1
            for loss in losses
        )

    def _are_on_policy(self, config: RunConfig) -> bool:
        """Whether the losses take the log-probabilities of the update itself for the old ones."""
        reads_old = "old_logprobs" in config.required_columns(self.config)
        return not reads_old and any(loss.on_policy for loss in self._policy_losses().values())

    def _kl_coefficients(self) -> dict[str, KLCoefficient]:
        """The KL coefficients that are adapted, by their key in the phase's config."""
        found = {
            f"losses.{name}.kl": loss.kl_coefficient
            for name, loss in self._policy_losses().items()
            if loss.kl_coefficient.adaptive is not None
        }
        if self.reward_kl is not None and self.reward_kl.coefficient.adaptive is not None:
            found["advantage.kl_in_reward"] = self.reward_kl.coefficient
        return found

    def _policy_losses(self) -> dict[str, LanguageModelPolicyGradientLoss[Any]]:
        return {
            name: loss
            for name, loss in self._context.model.head.losses.items()
            if isinstance(loss, LanguageModelPolicyGradientLoss)
        }


@contextmanager
def _on_policy(losses: Mapping[str, LanguageModelPolicyGradientLoss[Any]]) -> Iterator[None]:
    """Losses whose old policy is the policy itself."""
    before = {name: loss.on_policy for name, loss in losses.items()}
    for loss in losses.values():
        loss.on_policy = True
    try:
        yield
    finally:
        for name, loss in losses.items():
            loss.on_policy = before[name]
