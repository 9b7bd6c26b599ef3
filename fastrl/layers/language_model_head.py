"""The language-model head: hidden states in; loss, metrics and log-probabilities out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_dataclass

from fastrl.config.losses import (
    DEFAULT_INITIALIZER_RANGE,
    AnyLossConfig,
    DistillationLossConfig,
    LanguageModelHeadConfig,
)
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.head.call import CallOptions, HeadCall, HeadOperands, as_operand
from fastrl.functional.head.checks import check_inputs, check_tensor
from fastrl.functional.head.distillation import Teacher, teacher_divergence
from fastrl.functional.head.extra_statistics import check_names, extra_statistics
from fastrl.functional.head.main_grad import with_main_grad
from fastrl.functional.head.merge_tree import MergeTree
from fastrl.functional.head.output_layer import head_operands
from fastrl.functional.head.recompute import recompute_logprobs
from fastrl.functional.head.recorded_teacher import recorded_divergence
from fastrl.functional.head.replay import replay_logprobs
from fastrl.functional.head.sampling_mask import KeepSet, masked_logprobs
from fastrl.functional.head.single_pass import single_pass
from fastrl.functional.head.tile_ops import chunk_itemsize
from fastrl.functional.statistics import TokenStatistics
from fastrl.functional.streams import of_stream
from fastrl.kernels.arguments import LogitTransform
from fastrl.layers.head_plan import (
    HeadPlan,
    OperandFacts,
    check_is_batch,
    head_splits_tokens,
    plan_head,
    weight_rows,
)
from fastrl.layers.losses import (
    LanguageModelLoss,
    LanguageModelPolicyGradientLoss,
    build_loss,
)
from fastrl.layers.recorded_entries import is_recorded, replay_rows, with_recorded
from fastrl.parallel import (
    ParallelGroups,
    gather_first_dim,
    group_rank,
    group_size,
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


@dataclass(frozen=True)
class _PassResult:
    """Result of one pass: the sum of its weighted losses, their metrics, detached statistics."""

    loss: Tensor
    metrics: dict[str, Tensor]
    statistics: TokenStatistics


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
        return self._local(self.weight)

    @property
    def local_bias(self) -> Tensor | None:
        """[V] or [V_local], like `local_weight`."""
        return None if self.bias is None else self._local(self.bias)

    def _local(self, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        is_sharded = any(not placement.is_replicate() for placement in parameter.placements)
        if parameter.device_mesh.ndim > 1 or (is_sharded and self.groups.tp is None):
            raise TypeError(
                "`weight` and `bias` must be whole but for vocabulary parallelism, got a DTensor"
                f" with placements {parameter.placements}; call the head inside the module that"
                " `fully_shard` wraps, which gathers them."
            )
        return parameter.to_local()

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
        operands = self._operands(hidden_states, batch, weight, bias, compute_dtype, main_grad)
        if compute_loss and not self.losses:
            raise ValueError("`compute_loss` must not be True without losses; see `set_losses`.")
        losses = self.losses if (self.training if compute_loss is None else compute_loss) else {}
        self._check_requests(teacher, losses, statistics)
        facts, batch = _facts(operands), with_recorded(self.config.keep, losses, batch)
        plans = plan_head(self.config, self.groups, batch, losses, facts, return_logprobs)
        results = [self._run(plan, operands, teacher) for plan in plans.losses]
        read: TokenStatistics | None = None
        if plans.losses and plans.losses[0].has_logprobs:
            read = results[0].statistics
        elif return_logprobs or not plans.losses:
            with torch.no_grad():
                read = self._statistics(plans.labels, operands)
        return HeadOutput(
            _total([result.loss for result in results]) if results else None,
            {name: value for result in results for name, value in result.metrics.items()},
            None if read is None else self._of_all_tokens(read.logprobs),
            None if read is None or read.entropy is None else self._of_all_tokens(read.entropy),
            plans.losses[0].strategy if results and _needs_gradient(operands) else None,
            self._named_statistics(plans.labels, operands, statistics),
        )

    def _operands(
        self,
        hidden_states: Tensor,
        batch: BatchKwargs,
        weight: Tensor | nn.Module | None,
        bias: Tensor | None,
        compute_dtype: torch.dtype | None,
        main_grad: Tensor | None,
    ) -> HeadOperands:
        """What is multiplied: this head's parameters, or what the call was given."""
        check_tensor("hidden_states", hidden_states)
        check_is_batch(batch)
        if hidden_states.ndim > 2:
            hidden_states = hidden_states.flatten(0, -2)
        if not self.owns_weight:
            if weight is None:
                raise ValueError(
                    "`weight` must be given to a head without parameters, got None; pass the"
                    " model's output layer."
                )
            operands = head_operands(hidden_states, weight, bias, compute_dtype)
            low_rank = operands.low_rank_weight
            local = replace(
                operands,
                weight=self._local(operands.weight),
                bias=None if operands.bias is None else self._local(operands.bias),
                low_rank_weight=None if low_rank is None else self._local(low_rank),
            )
            return with_main_grad(local, main_grad)
        if weight is not None or bias is not None:
            raise ValueError(
                "`weight` and `bias` must not be given to a head that has its own; make it with"
                " `owns_weight=False`."
            )
        own = HeadOperands(hidden_states, self.local_weight, self.local_bias, dtype=compute_dtype)
        return with_main_grad(own, main_grad)

    def _run(self, plan: HeadPlan, operands: HeadOperands, teacher: Teacher | None) -> _PassResult:
        if any("divergence" in loss.needs for loss in plan.losses.values()):
            statistics = self._divergence(plan, operands, teacher)
        elif plan.chunk_ends is not None and _needs_gradient(operands):
            return self._run_single_pass(plan, plan.chunk_ends, operands)
        else:
            statistics = self._statistics(plan, operands)
        terms: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for name, loss in plan.losses.items():
            batch = of_stream(plan.batch, loss.config.stream)
            if self.config.metrics:
                value, of_loss = loss.with_metrics(statistics, batch)
                metrics |= _named(name, of_loss)
            else:
                value = loss(statistics, batch)
            # New memory also for a weight of 1: metrics hold the value.
            terms.append(loss.config.weight * value)
        return _PassResult(_total(terms), metrics, statistics.map(Tensor.detach))

    def _run_single_pass(
        self, plan: HeadPlan, chunk_ends: list[int], operands: HeadOperands
    ) -> _PassResult:
        losses, compact = plan.losses, plan.batch.select(plan.gradient_rows.index)

        def chunk_loss(statistics: TokenStatistics, start: int, stop: int) -> Tensor:
            is_all = stop - start == compact.num_tokens
            chunk = compact if is_all else compact.select(slice(start, stop))
            terms: list[Tensor] = []
            for loss in losses.values():
                value = loss(statistics, of_stream(chunk, loss.config.stream))
                terms.append(value if loss.config.weight == 1 else loss.config.weight * value)
            return _total(terms)

        value, statistics = single_pass(
            self._call(plan, operands),
            chunk_loss,
            gradient_rows=plan.gradient_rows.index,
            chunk_ends=chunk_ends,
        )
        metrics: dict[str, Tensor] = {}
        if self.config.metrics:
            for name, loss in losses.items():
                own = of_stream(plan.batch, loss.config.stream)
                metrics |= _named(name, loss.metrics(statistics, own))
        return _PassResult(value, metrics, statistics)

    def _statistics(self, plan: HeadPlan, operands: HeadOperands) -> TokenStatistics:
        """Statistics of the labels, over the sampler's keep-set if the config has one."""
        call = self._call(plan, operands)
        rows = plan.gradient_rows.index
        keep = self.config.keep
        if keep is None:
            statistics = recompute_logprobs(call, rows)
        elif keep.recorded:
            kept = plan.batch.entries["kept_tokens"]
            split = replay_rows(plan.batch, plan.rows, plan.gradient_rows)
            statistics = replay_logprobs(call, kept, split)
        else:
            searched = KeepSet(keep.top_k, keep.top_p, keep.min_p)
            statistics = masked_logprobs(call, searched, gradient_rows=rows)
        if not plan.statistics:
            return statistics
        return replace(statistics, **extra_statistics(call, plan.statistics, gradient_rows=rows))

    def _divergence(
        self, plan: HeadPlan, operands: HeadOperands, teacher: Teacher | None
    ) -> TokenStatistics:
        """The divergence from the teacher, and no other statistic."""
        (loss,) = plan.losses.values()
        config, call = loss.config, self._call(plan, operands)
        assert isinstance(config, DistillationLossConfig)
        if config.recorded:
            recorded = plan.batch.teacher_tokens
            assert recorded is not None
            value = recorded_divergence(call, recorded, config.divergence, config.beta)
        else:
            assert teacher is not None
            value = teacher_divergence(call, teacher, config.divergence, config.beta)
        none = torch.zeros_like(value)
        return TokenStatistics(none, None, none, divergence=value)

    def _named_statistics(
        self, plan: HeadPlan, operands: HeadOperands, names: Collection[str]
    ) -> dict[str, Tensor]:
        if not names:
            return {}
        with torch.no_grad():
            found = extra_statistics(self._call(plan, operands), names)
        return {name: self._of_all_tokens(value) for name, value in found.items()}

    def _call(self, plan: HeadPlan, operands: HeadOperands) -> HeadCall:
        config = self.config
        return check_inputs(
            operands,
            plan.batch.labels,
            transform=LogitTransform(plan.batch.temperature, config.softcap, config.logit_scale),
            vocab_size=config.vocab_size,
            weight_rows=self.weight_rows,
            groups=self.groups,
            rows=plan.rows.index,
            options=CallOptions(
                plan.entropy,
                config.chunk_size,
                config.max_logits_bytes,
                config.drop_inactive_rows,
                deterministic=config.deterministic,
            ),
        )

    def _of_all_tokens(self, values: Tensor) -> Tensor:
        """[T] of the whole batch, detached; gathered where each rank of `sp` computed a slice."""
        values = values.detach()
        if not self.head_splits_tokens:
            return values
        assert self.groups.sp is not None
        return gather_first_dim(values, self.groups.sp)

    def _check_requests(
        self,
        teacher: Teacher | None,
        losses: Mapping[str, LanguageModelLoss[Any]],
        statistics: Collection[str],
    ) -> None:
        """Refuses a missing teacher, one that none of the losses uses, and unknown statistics."""
        check_names(statistics, self.config.deterministic)
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


def _needs_gradient(operands: HeadOperands) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in operands.tensors)


def _facts(operands: HeadOperands) -> OperandFacts:
    """What the strategy depends on: layouts, not the tensors' rows."""
    dtype = operands.operand_dtype
    hidden, weight = (
        tensor if tensor.dtype == dtype else as_operand(tensor[:0], dtype)
        for tensor in (operands.hidden_states, operands.weight)
    )
    itemsize = chunk_itemsize(hidden, weight)
    return OperandFacts(dtype, itemsize, operands.low_rank_weight is not None)


def _total(losses: list[Tensor]) -> Tensor:
    """The sum of scalars; a single one is itself."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _named(name: str, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics of the loss `name`."""
    return {f"{name}/{metric}": value for metric, value in metrics.items()}
