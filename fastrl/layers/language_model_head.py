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

from fastrl.config.losses import AnyLossConfig, DistillationLossConfig, LanguageModelHeadConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.head.call import HeadCall, check_inputs
from fastrl.functional.head.distillation import Teacher, teacher_divergence
from fastrl.functional.head.extra_statistics import STATISTIC_NAMES, extra_statistics
from fastrl.functional.head.recompute import streaming_logprobs
from fastrl.functional.head.sampling_mask import KeepSet, masked_logprobs
from fastrl.functional.head.single_pass import single_pass
from fastrl.functional.head.tile_ops import chunk_itemsize
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import LogitTransform
from fastrl.layers.head_plan import (
    gradient_rows,
    head_splits_tokens,
    labelled_rows,
    sequence_slice,
    single_pass_chunks,
    weight_rows,
)
from fastrl.layers.losses import (
    LanguageModelLoss,
    LanguageModelPolicyGradientLoss,
    build_loss,
)
from fastrl.parallel import (
    ParallelGroups,
    gather_first_dim,
    group_rank,
    group_size,
    vocab_shard,
)


@dataclass(frozen=True)
class HeadOutput:
    """What the head returns.

    Attributes:
        loss: scalar fp32: this rank's part of the global loss, a sum over its own tokens divided by
            counts of the whole step; None without losses.
        metrics: detached scalars `<loss name>/<metric>`, to be added over micro-batches and ranks.
        logprobs: [T] fp32 nats of the labels, detached, where asked for; 0 without label.
        entropy: [T] fp32 nats, like `logprobs`.
        strategy: `recompute` or `single_pass`, the one that was taken; None without losses, and
            without a gradient, for which both compute the same.
        statistics: [T] each, by name, those that were asked for; detached.
    """

    loss: Tensor | None
    metrics: dict[str, Tensor]
    logprobs: Tensor | None  # [T]
    entropy: Tensor | None  # [T]
    strategy: str | None
    statistics: dict[str, Tensor] = field(default_factory=dict)


# FSDP2 looks for the tensors of a module's output in it; before torch 2.13 only in known classes.
register_dataclass(HeadOutput)


class LanguageModelHead(nn.Module):
    """The head's weight, its named losses and its process groups.

    Args:
        config: sizes, losses and bounds.
        groups: process groups; under `groups.tp` the weight holds this rank's vocabulary rows
            (`vocab_shard`) unless `config.vocabulary_parallel` is off.
        device: of the parameters.
        dtype: of the parameters, and so of the hidden states.

    Attributes:
        weight: [V, D], [V_local, D] under vocabulary parallelism. Normal, std 0.02, at first.
        bias: [V] or [V_local], zeros at first; None without `config.bias`.
        losses: the losses by name.
    """

    def __init__(
        self,
        config: LanguageModelHeadConfig,
        groups: ParallelGroups | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.losses: dict[str, LanguageModelLoss[Any]] = {}
        self.use_groups(groups or ParallelGroups())
        tp = self.groups.tp
        start, stop = vocab_shard(self.weight_rows, group_rank(tp), group_size(tp))
        self.weight = nn.Parameter(
            torch.empty(stop - start, config.hidden_size, device=device, dtype=dtype)
        )
        self.bias: nn.Parameter | None = None
        if config.bias:
            self.bias = nn.Parameter(torch.empty(stop - start, device=device, dtype=dtype))
        self.reset_parameters()

    def use_groups(self, groups: ParallelGroups) -> None:
        """Sets the process groups and makes the config's losses anew.

        The parameters must be sharded accordingly: plain tensors that are this rank's part, or
        DTensors over the tensor axis alone (`fastrl.models.parallelize`).
        """
        # Of the op: with a replicated weight the tensor axis shards nothing in the head.
        tp = groups.tp if self.config.vocabulary_parallel else None
        self.groups = ParallelGroups(tp=tp, sp=groups.sp, sdp=groups.sdp, dp=groups.dp)
        self.set_losses(self.config.losses)

    @property
    def local_weight(self) -> Tensor:
        """[V, D] or [V_local, D]: this rank's rows as a plain tensor, which the op takes."""
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
        return (
            self.groups.dp,
            self.groups.sdp,
            self.groups.sp if self.head_splits_tokens else None,
        )

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, 0.02^2) and zeroes the bias."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def set_losses(self, losses: Mapping[str, AnyLossConfig]) -> None:
        """Replaces the named losses, as between the phases of a training run.

        Raises:
            ValueError: a loss means nothing under this head.
        """
        self.config.check_losses(losses)
        token_groups = (self.groups.sdp, self.groups.sp if self.head_splits_tokens else None)
        self.losses = {
            name: build_loss(config, token_groups, self.groups.dp)
            for name, config in losses.items()
        }

    def end_step(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Tells the losses the finished metrics of the optimizer step, for what adapts to them.

        Args:
            metrics: the whole step's (`reduce_metrics`), or at least `<loss>/entropy` of the losses
                with an adaptive entropy bonus.
        """
        for name, loss in self.losses.items():
            if isinstance(loss, LanguageModelPolicyGradientLoss) and loss.entropy_bonus.adaptive:
                loss.entropy_bonus.end_step(float(metrics[f"{name}/entropy"]))

    # torch.compile leaves it as one piece: a batch's counts must not be constants of a graph.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
        batch: BatchKwargs,
        *,
        return_logprobs: bool = False,
        statistics: Collection[str] = (),
        teacher: Teacher | None = None,
    ) -> HeadOutput:
        """Loss and metrics of the batch; in evaluation mode its log-probabilities instead.

        Under `torch.no_grad()` in training mode the loss is computed and nothing of a backward. In
        evaluation mode there is no loss: `logprobs` and `entropy` are those of an old or a
        reference policy.

        Args:
            hidden_states: after the final norm, in the weight's dtype; under sequence parallelism
                this rank's slice of the tokens.
            batch: of all T tokens of this rank's (micro-)sequence.
            return_logprobs: also return `logprobs` and `entropy`, detached, from the same pass.
            statistics: names out of `mean_logit`, `sum_squares`, `is_argmax`, returned as well;
                they take a pass of their own.
            teacher: for the losses of type `distillation`, which need one; sharded like
                `hidden_states` and the weight.

        Raises:
            ValueError: the batch lacks what a loss needs, a shape does not fit, the strategy
                `single_pass` is not possible for the batch, or a teacher is missing or not used.
        """
        if self.head_splits_tokens:
            batch = sequence_slice(batch, self.groups)
        self._check_teacher(teacher)
        named = self._named_statistics(hidden_states, batch, statistics)
        if not self.training or not self.losses:
            result = self._evaluate(hidden_states, batch).map(self._of_all_tokens)
            return HeadOutput(None, {}, result.logprobs, result.entropy, None, named)
        passes = [
            self._pass(hidden_states, batch, scale, losses, return_logprobs)
            for scale, losses in self._passes().items()
        ]
        if teacher is not None:
            passes.append(self._distillation(hidden_states, batch, teacher))
        first = passes[0]
        if return_logprobs and first.logprobs is None:
            with torch.no_grad():
                result = self._evaluate(hidden_states, batch)
            first = replace(first, logprobs=result.logprobs, entropy=result.entropy)
        return HeadOutput(
            torch.stack([part.loss for part in passes if part.loss is not None]).sum(),
            {name: value for part in passes for name, value in part.metrics.items()},
            None if first.logprobs is None else self._of_all_tokens(first.logprobs),
            None if first.entropy is None else self._of_all_tokens(first.entropy),
            first.strategy,
            named,
        )

    def _of_all_tokens(self, values: Tensor) -> Tensor:
        """[T] of the batch, also where each rank of `sp` computed its slice."""
        if not self.head_splits_tokens:
            return values
        assert self.groups.sp is not None
        return gather_first_dim(values, self.groups.sp)

    def _passes(self) -> dict[float, Losses]:
        """The losses by the scale of the logits that they see, 1 first: a pass for each."""
        passes: dict[float, Losses] = {}
        for name, loss in self.losses.items():
            if "divergence" not in loss.needs:
                passes.setdefault(loss.config.logits_scale, {})[name] = loss
        return dict(sorted(passes.items(), key=lambda item: (item[0] != 1, item[0])))

    def _pass(
        self,
        hidden_states: Tensor,
        batch: BatchKwargs,
        scale: float,
        losses: Losses,
        return_logprobs: bool,
    ) -> HeadOutput:
        """Losses that see the same logits, from one pass over them."""
        return_logprobs = return_logprobs and scale == 1
        batch = _at_scale(batch, scale)
        active = gradient_rows(batch, losses)
        wants_all = self.config.metrics or return_logprobs
        rows = (labelled_rows(batch) if wants_all else active).index
        needs = frozenset[str]().union(*(loss.needs for loss in losses.values()))
        call = self._call(hidden_states, batch, wants_all or "entropy" in needs, rows)
        itemsize = chunk_itemsize(hidden_states, self.local_weight)
        chunk_ends = single_pass_chunks(
            self.config, self.groups, batch, active, losses, hidden_states.dtype, itemsize
        )
        needs_gradient = self._needs_gradient(hidden_states)
        metrics: dict[str, Tensor] = {}
        if chunk_ends is not None and needs_gradient:
            compact = batch.select(active.index)
            loss, statistics = single_pass(
                hidden_states,
                self.local_weight,
                self.local_bias,
                call,
                lambda statistics, start, stop: _weighted_sum(
                    losses, statistics, compact.select(slice(start, stop))
                ),
                gradient_rows=active.index,
                chunk_ends=chunk_ends,
            )
            if self.config.metrics:
                metrics = _metrics(losses, statistics, batch)
        else:
            statistics = self._statistics(hidden_states, batch, call, active.index)
            more = extra_statistics(
                hidden_states,
                self.local_weight,
                self.local_bias,
                call,
                needs & frozenset(STATISTIC_NAMES),
                gradient_rows=active.index,
            )
            statistics = replace(statistics, **more)
            loss, metrics = self._sum(losses, statistics, batch)
        statistics = statistics.map(Tensor.detach)
        strategy = "recompute" if chunk_ends is None else "single_pass"
        return HeadOutput(
            loss,
            metrics,
            statistics.logprobs if return_logprobs else None,
            statistics.entropy if return_logprobs else None,
            strategy if needs_gradient else None,
        )

    def _distillation(
        self, hidden_states: Tensor, batch: BatchKwargs, teacher: Teacher
    ) -> HeadOutput:
        """The losses that compare with a teacher: a pass over both heads' logits for each."""
        if self.config.strategy == "single_pass":
            raise ValueError(
                "`strategy: single_pass` must not be given with a loss of type `distillation`,"
                " which takes a pass over both heads' logits of its own; use `auto` or `recompute`."
            )
        total: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        rows = labelled_rows(batch).index
        for name, loss in self.losses.items():
            config = loss.config
            if not isinstance(config, DistillationLossConfig):
                continue
            scaled = _at_scale(batch, config.logits_scale)
            divergence = teacher_divergence(
                hidden_states,
                self.local_weight,
                self.local_bias,
                self._call(hidden_states, scaled, False, rows),
                teacher,
                config.divergence,
                config.beta,
            )
            none = torch.zeros_like(divergence)
            statistics = TokenStatistics(none, None, none, divergence=divergence)
            value, of_loss = self._sum({name: loss}, statistics, scaled)
            total.append(value)
            metrics |= of_loss
        return HeadOutput(torch.stack(total).sum(), metrics, None, None, "recompute")

    def _sum(
        self, losses: Losses, statistics: TokenStatistics, batch: BatchKwargs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the losses, and their metrics where the config asks for them."""
        if self.config.metrics:
            return _sum_with_metrics(losses, statistics, batch)
        return _weighted_sum(losses, statistics, batch), {}

    def _check_teacher(self, teacher: Teacher | None) -> None:
        names = [name for name, loss in self.losses.items() if "divergence" in loss.needs]
        if names and self.training and teacher is None:
            raise ValueError(f"`teacher` must be given for the losses {names}, got None.")
        if teacher is not None and not (names and self.training):
            raise ValueError(
                "`teacher` must not be given without a loss of type `distillation` in training"
                f" mode: it has no effect, the losses are {list(self.losses)}."
            )

    def _evaluate(self, hidden_states: Tensor, batch: BatchKwargs) -> TokenStatistics:
        """Log-probabilities and entropies of all labels, detached."""
        rows = labelled_rows(batch).index
        call = self._call(hidden_states, batch, True, rows)
        return self._statistics(hidden_states, batch, call, None).map(Tensor.detach)

    def _named_statistics(
        self, hidden_states: Tensor, batch: BatchKwargs, names: Collection[str]
    ) -> dict[str, Tensor]:
        if not names:
            return {}
        call = self._call(hidden_states, batch, False, labelled_rows(batch).index)
        with torch.no_grad():
            found = extra_statistics(hidden_states, self.local_weight, self.local_bias, call, names)
        return {name: self._of_all_tokens(value) for name, value in found.items()}

    def _needs_gradient(self, hidden_states: Tensor) -> bool:
        tensors = (hidden_states, self.weight, self.bias)
        return torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in tensors
        )

    def _call(
        self, hidden_states: Tensor, batch: BatchKwargs, entropy: bool, rows: Tensor
    ) -> HeadCall:
        return check_inputs(
            hidden_states,
            self.local_weight,
            batch.labels,
            bias=self.local_bias,
            transform=LogitTransform(
                batch.temperature, self.config.softcap, self.config.logit_scale
            ),
            vocab_size=self.config.vocab_size,
            weight_rows=self.weight_rows,
            groups=self.groups,
            chunk_size=self.config.chunk_size,
            max_logits_bytes=self.config.max_logits_bytes,
            entropy=entropy,
            rows=rows,
            drop_inactive_rows=self.config.drop_inactive_rows,
        )

    def _statistics(
        self,
        hidden_states: Tensor,
        batch: BatchKwargs,
        call: HeadCall,
        gradient_rows: Tensor | None,
    ) -> TokenStatistics:
        """Statistics of the labels, over the sampler's keep-set if the config has one."""
        keep = self.config.keep
        if keep is None:
            return streaming_logprobs(
                hidden_states, self.local_weight, self.local_bias, call, gradient_rows
            )
        tokens = None
        if keep.recorded:
            if batch.kept_tokens is None:
                raise ValueError(
                    "`kept_tokens` must be in the batch with `keep.recorded`, got None; give each"
                    " Document `kept_tokens`."
                )
            tokens = batch.kept_tokens
        return masked_logprobs(
            hidden_states,
            self.local_weight,
            self.local_bias,
            call,
            KeepSet(keep.top_k, keep.top_p, keep.min_p, tokens),
            gradient_rows=gradient_rows,
        )


Losses = dict[str, LanguageModelLoss[Any]]


def _at_scale(batch: BatchKwargs, scale: float) -> BatchKwargs:
    """The batch for a loss that sees the logits times `scale`."""
    return batch if scale == 1 else batch.replace(temperature=batch.temperature / scale)


def _weighted_sum(losses: Losses, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
    terms = [loss.config.weight * loss(statistics, batch) for loss in losses.values()]
    return torch.stack(terms).sum()


def _metrics(losses: Losses, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
    return {
        f"{name}/{metric}": value
        for name, loss in losses.items()
        for metric, value in loss.metrics(statistics, batch).items()
    }


def _sum_with_metrics(
    losses: Losses, statistics: TokenStatistics, batch: BatchKwargs
) -> tuple[Tensor, dict[str, Tensor]]:
    terms: list[Tensor] = []
    metrics: dict[str, Tensor] = {}
    for name, loss in losses.items():
        value, of_loss = loss.with_metrics(statistics, batch)
        terms.append(loss.config.weight * value)
        metrics |= {f"{name}/{metric}": number for metric, number in of_loss.items()}
    return torch.stack(terms).sum(), metrics
