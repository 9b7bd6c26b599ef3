"""The language-model head: hidden states in; loss, metrics and log-probabilities out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import register_dataclass

from fastrl.config.losses import DEFAULT_INITIALIZER_RANGE, AnyLossConfig, LanguageModelHeadConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.head.checks import check_tensor
from fastrl.functional.head.distillation import Teacher
from fastrl.functional.head.extra_statistics import check_names
from fastrl.functional.head.merge_tree import MergeTree
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.call_operands import call_operands, local_tensor, needs_gradient, operand_facts
from fastrl.layers.head_pass import HeadPass, PassResult, total
from fastrl.layers.head_plan import check_is_batch, plan_head, weight_rows
from fastrl.layers.losses import LanguageModelLoss, LanguageModelPolicyGradientLoss, build_loss
from fastrl.layers.recorded_entries import is_recorded, with_recorded
from fastrl.parallel import (
    ParallelGroups,
    gather_first_dim,
    group_rank,
    group_size,
    head_splits_tokens,
    vocab_shard,
)


@dataclass(frozen=True)
class HeadOutput:
    """Output of the head.

    Attributes:
        loss: scalar fp32: this rank's part of the global loss, a sum over its own tokens divided by
            counts of the whole step; None without losses, and in evaluation mode unless
            `compute_loss` asks for it.
        metrics: detached scalars `<loss name>/<metric>`, to be added over micro-batches and ranks.
        logprobs: [T] fp32 nats of the labels, detached, if requested; 0 without label.
        entropy: [T] fp32 nats, like `logprobs`.
        strategy: the one used, `recompute` or `single_pass`; None without losses or gradient, where
            both compute the same.
        statistics: the requested ones by name, [T] each, detached.
    """

    loss: Tensor | None
    metrics: dict[str, Tensor]
    logprobs: Tensor | None  # [T]
    entropy: Tensor | None  # [T]
    strategy: str | None
    statistics: dict[str, Tensor] = field(default_factory=dict)


# FSDP2 finds the tensors of a module's output by pytree: before torch 2.13 in registered classes.
register_dataclass(HeadOutput)


class LanguageModelHead(nn.Module):
    """The head's weight, its named losses and its process groups.

    A head without parameters of its own is given the weight in each call: that of a model whose
    output layer stays where it is.

    Args:
        config: sizes, losses and bounds.
        groups: process groups; under `groups.tp` the weight holds this rank's vocabulary rows
            (`vocab_shard`) unless `config.vocabulary_parallel` is off.
        device: of the parameters.
        dtype: of the parameters, and so of the hidden states.
        owns_weight: whether the head has parameters; without, `forward` takes `weight`.

    Attributes:
        weight: [V, D], [V_local, D] under vocabulary parallelism; None if the head has none.
        bias: [V] or [V_local]; None without `config.bias`.
        losses: the losses by name.
    """

    def __init__(
        self,
        config: LanguageModelHeadConfig,
        groups: ParallelGroups | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        owns_weight: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.losses: dict[str, LanguageModelLoss[Any]] = {}
        self.use_groups(groups or ParallelGroups())
        tp = self.groups.tp
        start, stop = vocab_shard(self.weight_rows, group_rank(tp), group_size(tp))
        self.owns_weight = owns_weight
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if owns_weight:
            size = (stop - start, config.hidden_size)
            self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
            if config.bias:
                self.bias = nn.Parameter(torch.empty(stop - start, device=device, dtype=dtype))
            self.reset_parameters()
        elif device is not None or dtype is not None or config.bias:
            raise ValueError(
                "`device`, `dtype` and `bias` of the config must not be given with"
                f" `owns_weight=False`, got {device}, {dtype} and {config.bias}: they are those of"
                " the weight and the bias that each call is given."
            )

    def use_groups(self, groups: ParallelGroups) -> None:
        """Sets the process groups and rebuilds the config's losses.

        The parameters must be sharded accordingly: plain tensors that are this rank's part, or
        DTensors over the tensor axis alone (`fastrl.models.parallelize`).
        """
        # With a replicated weight the tensor axis shards nothing in the head.
        tp = groups.tp if self.config.vocabulary_parallel else None
        if self.config.deterministic:
            MergeTree(self.weight_rows, group_size(tp)).check_shards()
        self.groups = ParallelGroups(tp=tp, sp=groups.sp, sdp=groups.sdp, dp=groups.dp)
        self.set_losses(self.config.losses)

    @property
    def local_weight(self) -> Tensor:
        """[V, D] or [V_local, D]: this rank's rows of the weight as a plain tensor."""
        return local_tensor(self.weight, self.groups.tp)

    @property
    def local_bias(self) -> Tensor | None:
        """[V] or [V_local], like `local_weight`."""
        return None if self.bias is None else local_tensor(self.bias, self.groups.tp)

    @property
    def weight_rows(self) -> int:
        """Rows of the whole weight, padding included."""
        return weight_rows(self.config)

    @property
    def head_splits_tokens(self) -> bool:
        """Whether the ranks of `sp` hold different tokens, also in the head."""
        return head_splits_tokens(self.groups)

    @property
    def loss_groups(self) -> tuple[ProcessGroup | None, ...]:
        """Groups over whose ranks losses and metrics add up to those of the step."""
        return (self.groups.dp, *self._token_groups)

    @property
    def _token_groups(self) -> tuple[ProcessGroup | None, ...]:
        """Groups over which the tokens of a document may be split."""
        return (self.groups.sdp, self.groups.sp if self.head_splits_tokens else None)

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, DEFAULT_INITIALIZER_RANGE^2) and zeroes the bias."""
        if not self.owns_weight:
            return
        nn.init.normal_(self.weight, std=DEFAULT_INITIALIZER_RANGE)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def set_losses(self, losses: Mapping[str, AnyLossConfig]) -> None:
        """Replaces the named losses, as between the phases of a training run.

        Raises:
            ValueError: a loss is not compatible with this head.
        """
        self.config.check_losses(losses)
        self.losses = {
            name: build_loss(config, self._token_groups, self.groups.dp)
            for name, config in losses.items()
        }

    def end_step(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Updates what adapts to the optimizer step: entropy bonuses and KL coefficients.

        Args:
            metrics: of the whole step (`reduce_metrics`), at least `<loss>/entropy` of the losses
                with an adaptive entropy bonus, `<loss>/kl_ref` and `<loss>/documents` of those with
                an adaptive KL coefficient.
        """
        for name, loss in self.losses.items():
            if not isinstance(loss, LanguageModelPolicyGradientLoss):
                continue
            if loss.entropy_bonus.adaptive is not None:
                loss.entropy_bonus.end_step(float(metrics[f"{name}/entropy"]))
            if loss.kl_coefficient.adaptive is not None:
                kl, documents = metrics[f"{name}/kl_ref"], metrics[f"{name}/documents"]
                loss.kl_coefficient.end_step(float(kl), float(documents))

    # Not compiled: a batch's counts must not become constants of a graph.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: Tensor,  # [T, D] or [B, L, D]
        batch: BatchKwargs,
        *,
        weight: Tensor | nn.Module | None = None,  # [V, D]
        bias: Tensor | None = None,  # [V]
        compute_dtype: torch.dtype | None = None,
        compute_loss: bool | None = None,
        return_logprobs: bool = False,
        statistics: Collection[str] = (),
        teacher: Teacher | None = None,
        main_grad: Tensor | None = None,  # [V, D]
    ) -> HeadOutput:
        """Loss and metrics of the batch; in evaluation mode its log-probabilities instead.

        Under `torch.no_grad()` in training mode the loss is computed without gradients. In
        evaluation mode `logprobs` and `entropy` are those of an old or a reference policy.

        Args:
            hidden_states: after the final norm, in the weight's dtype; under sequence parallelism
                this rank's slice of the tokens. [B, L, D] has the batch's tokens in its order.
            batch: all T tokens of this rank's (micro-)sequence.
            weight: of a head without parameters: a tensor, or the module that owns it
                (`head_operands`) and brings its bias.
            bias: beside a tensor `weight`.
            compute_dtype: of the operands of the products, as in `linear_logprobs`.
            compute_loss: default: in training mode, in which `from_pretrained` leaves no model.
            return_logprobs: whether `logprobs` and `entropy` are part of the output beside a loss.
            statistics: of `mean_logit`, `sum_squares`, `is_argmax`, the names of a separate pass.
            teacher: of `distillation` losses that are not `recorded`; sharded like the head.
            main_grad: a buffer that the weight's gradient is added to, as of `linear_logprobs`.

        Raises:
            ValueError: the batch lacks what a loss needs, a shape does not fit, `single_pass` is
                required and not possible, or a weight, teacher or buffer is missing or not used.
            TypeError: an argument is of another type.
        """
        check_tensor("hidden_states", hidden_states)
        check_is_batch(batch)
        own = (self.local_weight, self.local_bias) if self.owns_weight else None
        tp = self.groups.tp
        operands = call_operands(hidden_states, own, weight, bias, compute_dtype, main_grad, tp)
        losses = self._requested_losses(compute_loss, teacher)
        check_names(statistics, self.config.deterministic)
        facts, batch = operand_facts(operands), with_recorded(self.config.keep, losses, batch)
        plans = plan_head(self.config, self.groups, batch, losses, facts, return_logprobs)
        passes = [HeadPass(self.config, self.groups, operands, plan) for plan in plans.losses]
        of_labels = HeadPass(self.config, self.groups, operands, plans.labels)
        results = [each.run(teacher) for each in passes]
        read = _read(passes, results, of_labels if return_logprobs or not passes else None)
        named = of_labels.extra_statistics(statistics)
        return HeadOutput(
            total([result.loss for result in results]) if results else None,
            {name: value for result in results for name, value in result.metrics.items()},
            None if read is None else self._of_all_tokens(read.logprobs),
            None if read is None or read.entropy is None else self._of_all_tokens(read.entropy),
            plans.losses[0].strategy if results and needs_gradient(operands) else None,
            {name: self._of_all_tokens(value) for name, value in named.items()},
        )

    def _of_all_tokens(self, values: Tensor) -> Tensor:
        """[T] of the whole batch, detached; gathered where each rank of `sp` computed a slice."""
        values = values.detach()
        if not self.head_splits_tokens:
            return values
        assert self.groups.sp is not None
        return gather_first_dim(values, self.groups.sp)

    def _requested_losses(
        self, compute_loss: bool | None, teacher: Teacher | None
    ) -> Mapping[str, LanguageModelLoss[Any]]:
        """The losses of a call; refuses a missing teacher, and one that none of them uses."""
        if compute_loss and not self.losses:
            raise ValueError("`compute_loss` must not be True without losses; see `set_losses`.")
        losses = self.losses if (self.training if compute_loss is None else compute_loss) else {}
        names = [
            name
            for name, loss in losses.items()
            if "divergence" in loss.needs and not is_recorded(loss)
        ]
        if names and teacher is None:
            raise ValueError(f"`teacher` must be given for the losses {names}, got None.")
        if teacher is not None and not names:
            raise ValueError(
                "`teacher` must not be given without a loss of type `distillation`, not `recorded`,"
                f" in training mode: it has no effect, the losses are {list(self.losses)}."
            )
        return losses


def _read(
    passes: list[HeadPass], results: list[PassResult], of_labels: HeadPass | None
) -> TokenStatistics | None:
    """The statistics that the output shows: of a pass that has them, else of one of their own."""
    if passes and passes[0].plan.has_logprobs:
        return results[0].statistics
    if of_labels is None:
        return None
    with torch.no_grad():
        return of_labels.statistics()
