"""One pass of the head over the logits: the losses, metrics and statistics of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastrl.config.losses import DistillationLossConfig, LanguageModelHeadConfig
from fastrl.functional.head.call import CallOptions, HeadCall, HeadOperands
from fastrl.functional.head.checks import check_inputs
from fastrl.functional.head.distillation import Teacher, teacher_divergence
from fastrl.functional.head.extra_statistics import extra_statistics
from fastrl.functional.head.recompute import recompute_logprobs
from fastrl.functional.head.recorded_teacher import recorded_divergence
from fastrl.functional.head.replay import replay_logprobs
from fastrl.functional.head.sampling_mask import KeepSet, masked_logprobs
from fastrl.functional.head.single_pass import single_pass
from fastrl.functional.statistics import TokenStatistics
from fastrl.functional.streams import of_stream
from fastrl.kernels.arguments import LogitTransform
from fastrl.layers.call_operands import needs_gradient
from fastrl.layers.head_plan import HeadPlan, weight_rows
from fastrl.layers.recorded_entries import replay_rows
from fastrl.parallel import ParallelGroups


@dataclass(frozen=True)
class PassResult:
    """Result of one pass.

    Attributes:
        loss: the sum of its weighted losses.
        metrics: of the losses.
        statistics: detached; None where nothing reads them.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    statistics: TokenStatistics | None


@dataclass(frozen=True)
class HeadPass:
    """A plan with what it runs on.

    Attributes:
        config: of the head.
        groups: of the head.
        operands: of the call.
        plan: one of the call's.
    """

    config: LanguageModelHeadConfig
    groups: ParallelGroups
    operands: HeadOperands
    plan: HeadPlan

    def run(self, teacher: Teacher | None) -> PassResult:
        """The losses of the plan, which has some, by its strategy.

        Args:
            teacher: of a distillation that is not `recorded`.
        """
        plan = self.plan
        if any("divergence" in loss.needs for loss in plan.losses.values()):
            statistics = self._divergence(teacher)
        elif plan.chunk_ends is not None and needs_gradient(self.operands):
            return self._run_single_pass(plan.chunk_ends)
        else:
            statistics = self.statistics()
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
        return PassResult(total(terms), metrics, statistics.map(Tensor.detach))

    def _run_single_pass(self, chunk_ends: list[int]) -> PassResult:
        plan = self.plan
        losses, compact = plan.losses, plan.batch.select(plan.gradient_rows)

        def chunk_loss(statistics: TokenStatistics, start: int, stop: int) -> Tensor:
            is_all = stop - start == compact.num_tokens
            chunk = compact if is_all else compact.select(slice(start, stop))
            terms: list[Tensor] = []
            for loss in losses.values():
                value = loss(statistics, of_stream(chunk, loss.config.stream))
                terms.append(value if loss.config.weight == 1 else loss.config.weight * value)
            return total(terms)

        value, statistics = single_pass(
            self._call(),
            chunk_loss,
            gradient_rows=plan.gradient_rows.index,
            chunk_ends=chunk_ends,
            with_statistics=self.config.metrics or plan.has_logprobs,
        )
        metrics: dict[str, Tensor] = {}
        if self.config.metrics:
            assert statistics is not None
            for name, loss in losses.items():
                own = of_stream(plan.batch, loss.config.stream)
                metrics |= _named(name, loss.metrics(statistics, own))
        return PassResult(value, metrics, statistics)

    def statistics(self) -> TokenStatistics:
        """Statistics of the labels, over the sampler's keep-set if the config has one."""
        plan, call = self.plan, self._call()
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

    def extra_statistics(self, names: Collection[str]) -> dict[str, Tensor]:
        """The rarer statistics `names` of the plan's rows, [T] each, without gradient."""
        if not names:
            return {}
        with torch.no_grad():
            return extra_statistics(self._call(), names)

    def _divergence(self, teacher: Teacher | None) -> TokenStatistics:
        """The divergence from the teacher, and no other statistic."""
        plan = self.plan
        (loss,) = plan.losses.values()
        config, call = loss.config, self._call()
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

    def _call(self) -> HeadCall:
        config, plan = self.config, self.plan
        return check_inputs(
            self.operands,
            plan.batch.labels,
            label_bound=plan.batch.label_bound,
            transform=LogitTransform(plan.batch.temperature, config.softcap, config.logit_scale),
            vocab_size=config.vocab_size,
            weight_rows=weight_rows(config),
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


def total(losses: list[Tensor]) -> Tensor:
    """The sum of scalars; a single one is itself."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _named(name: str, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics of the loss `name`."""
    return {f"{name}/{metric}": value for metric, value in metrics.items()}
