"""The plan of a call of the head, made on the host before it runs.

Nothing here synchronises, except for batches made by hand without row sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastrl.config.losses import HeadOptions, LanguageModelHeadConfig
from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.functional.head.extra_statistics import STATISTIC_NAMES
from fastrl.functional.head.tiling import SINGLE_PASS_MIN_ROWS, chunk_rows, single_pass_rows
from fastrl.layers.losses import LanguageModelLoss
from fastrl.parallel import (
    ParallelGroups,
    group_rank,
    group_size,
    head_splits_tokens,
    vocab_shard,
)

Losses = Mapping[str, LanguageModelLoss[Any]]


@dataclass(frozen=True)
class HeadPlan:
    """One pass over the logits.

    Attributes:
        batch: this rank's tokens in the head, with the temperature of the losses' logits.
        rows: the tokens whose statistics are computed.
        losses: by name, those of these logits; none in evaluation.
        gradient_rows: rows at which a loss can have a value or gradient.
        entropy: whether the entropy is computed.
        statistics: the rarer statistics that the losses are functions of.
        chunk_ends: ends of the chunks of `single_pass`; None for `recompute`.
        has_logprobs: whether its statistics give the requested log-probabilities.
    """

    batch: BatchKwargs
    rows: RowSet
    losses: Losses
    gradient_rows: RowSet
    entropy: bool = False
    statistics: frozenset[str] = frozenset()
    chunk_ends: list[int] | None = None
    has_logprobs: bool = False

    @property
    def strategy(self) -> str:
        """`recompute` or `single_pass`."""
        return "recompute" if self.chunk_ends is None else "single_pass"


@dataclass(frozen=True)
class HeadPlans:
    """The passes of one call.

    Attributes:
        losses: a pass for the losses of each `logits_scale`, 1 first; then one for each
            distillation.
        labels: over all labels, without a loss; run where no other pass gives what is requested.
    """

    losses: list[HeadPlan]
    labels: HeadPlan


@dataclass(frozen=True)
class OperandFacts:
    """Facts of the operands that the strategy depends on: the same on all ranks.

    Attributes:
        dtype: of the operands of the products.
        itemsize: bytes per element of the logits of `single_pass`.
        has_low_rank: whether the weight has a low-rank part beside it.
    """

    dtype: torch.dtype
    itemsize: int
    has_low_rank: bool = False


def plan_head(
    config: LanguageModelHeadConfig,
    groups: ParallelGroups,
    batch: BatchKwargs,
    losses: Losses,
    operands: OperandFacts,
    return_logprobs: bool,
) -> HeadPlans:
    """The passes of a call.

    Args:
        config: of the head.
        groups: of the head.
        batch: all tokens of the (micro-)sequence, as given to the head.
        losses: to compute, by name.
        operands: of the call.
        return_logprobs: whether the log-probabilities of all labels are requested.

    Raises:
        ValueError: the tokens cannot be split, `single_pass` is required and not possible, or the
            labels were drawn at random and a loss is no sum over them.
    """
    if batch.draw_weights is not None:
        _check_sums_over_tokens(losses)
    batch = own_tokens(batch, groups)
    labelled = batch.rows_with_labels
    if batch.labelled_rows is None:
        batch = replace(batch, labelled_rows=labelled)  # found once
    by_scale: dict[float, dict[str, LanguageModelLoss[Any]]] = {}
    for name, loss in losses.items():
        if "divergence" not in loss.needs:
            by_scale.setdefault(loss.config.logits_scale, {})[name] = loss
    plans: list[HeadPlan] = []
    for scale, same in sorted(by_scale.items(), key=lambda item: (item[0] != 1, item[0])):
        needs = needs_of(same)
        scaled = _at_scale(batch, scale)
        active = _rows_of_all(scaled, [loss.gradient_rows(scaled) for loss in same.values()])
        has_logprobs = return_logprobs and scale == 1
        reads_all = config.metrics or has_logprobs
        plan = HeadPlan(
            scaled,
            labelled if reads_all else active,
            same,
            active,
            entropy=reads_all or "entropy" in needs,
            statistics=needs & frozenset(STATISTIC_NAMES),
            chunk_ends=single_pass_chunks(config, groups, scaled, active, same, operands),
            has_logprobs=has_logprobs,
        )
        plans.append(plan)
    plans += [
        _distillation_plan(config, batch, labelled, name, loss)
        for name, loss in losses.items()
        if "divergence" in loss.needs
    ]
    return HeadPlans(plans, HeadPlan(batch, labelled, {}, labelled, entropy=True))


def _check_sums_over_tokens(losses: Losses) -> None:
    for name, loss in losses.items():
        if loss.scope != "token":
            raise ValueError(
                "`draw_weights` must not be in the batch with the loss"
                f" `{name}: {{type: {loss.config.type}}}`, as it compares tokens of a {loss.scope}"
                " and its mean over random parts of them is another; leave out the drawing of"
                " tokens, or options beyond single tokens."
            )


def _distillation_plan(
    config: LanguageModelHeadConfig,
    batch: BatchKwargs,
    labelled: RowSet,
    name: str,
    loss: LanguageModelLoss[Any],
) -> HeadPlan:
    if config.strategy == "single_pass":
        raise ValueError(
            "`strategy: single_pass` must not be given with a loss of type `distillation`,"
            " which takes a pass over both heads' logits of its own; use `auto` or"
            " `recompute`."
        )
    return HeadPlan(_at_scale(batch, loss.config.logits_scale), labelled, {name: loss}, labelled)


def _rows_of_all(batch: BatchKwargs, sets: Sequence[RowSet]) -> RowSet:
    """Rows that hold all the sets: the largest of the batch's own, which are nested; else all."""
    if len(sets) == 1:
        return sets[0]
    own = {id(rows) for rows in batch.row_sets.values()}
    return max(sets, key=len) if all(id(rows) in own for rows in sets) else batch.rows_with_labels


def weight_rows(config: LanguageModelHeadConfig) -> int:
    """Rows of the whole weight, padding included."""
    return config.padded_vocab_size or config.vocab_size


@dataclass(frozen=True)
class HeadRows:
    """Facts of a batch that the strategy depends on: the same on all ranks of a collective.

    Attributes:
        num_tokens: of the batch.
        num_active: rows with gradient.
        document_ends: cumulative number of them at the end of each document; None where documents
            are not known, and chunks may end at any row.
        is_cut: documents are split over ranks or micro-sequences.
    """

    num_tokens: int
    num_active: int
    document_ends: tuple[int, ...] | None
    is_cut: bool


def single_pass_chunks(
    config: LanguageModelHeadConfig,
    groups: ParallelGroups,
    batch: BatchKwargs,
    rows: RowSet,
    losses: Losses,
    operands: OperandFacts,
) -> list[int] | None:
    """`chunk_ends` of a batch under process groups."""
    columns = vocab_shard(weight_rows(config), 0, group_size(groups.tp))[1]
    is_cut = groups.sdp is not None or head_splits_tokens(groups) or not batch.whole_documents
    facts = HeadRows(batch.num_tokens, len(rows), rows.document_ends, is_cut)
    return chunk_ends(config, losses, facts, columns, operands)


def chunk_ends(
    config: HeadOptions,
    losses: Losses,
    rows: HeadRows,
    columns: int,
    operands: OperandFacts,
) -> list[int] | None:
    """Ends of the chunks of `single_pass`, or None for `recompute`.

    The same on all ranks that take part in the head's collectives.

    Args:
        config: bounds and strategy.
        losses: of the same logits.
        rows: of the batch.
        columns: maximum number of rows of the weight on a rank.
        operands: of the call.

    Raises:
        ValueError: `single_pass` is required and not possible.
    """
    if config.strategy == "recompute":
        return None
    bounds = (columns, operands.itemsize, config.chunk_size, config.max_logits_bytes)
    scopes = {loss.scope for loss in losses.values()}
    ends: list[int] | None = None
    reason = None
    if operands.has_low_rank:
        reason = "LoRA on the output layer takes slabs of the weight"
    elif config.keep is not None or needs_of(losses) & frozenset(STATISTIC_NAMES):
        reason = "`keep` and label smoothing take a pass over the logits of their own"
    elif scopes & {"group", "batch"}:
        reason = "pairs and quantiles over a batch need tokens outside of a chunk"
    elif "document" not in scopes:
        ends = chunk_rows(rows.num_active, *bounds)
    elif rows.is_cut:
        reason = "documents are split over ranks or micro-sequences"
    else:
        ends = chunk_rows(rows.num_active, *bounds, rows.document_ends)
        reason = "a document has more rows than `chunk_size` or `max_logits_bytes` admit"
    if ends is None and config.strategy == "single_pass":
        raise ValueError(
            f"`strategy: single_pass` must have all that a loss needs in a chunk for the losses"
            f" {list(losses)}, but {reason}; use `strategy: auto` or `recompute`."
        )
    has_few_rows = single_pass_rows(*bounds) < min(rows.num_tokens, SINGLE_PASS_MIN_ROWS)
    # `single_pass` rounds dz before the loss scale is applied: in fp16 small gradients underflow.
    if config.strategy == "auto" and (has_few_rows or operands.dtype == torch.float16):
        return None
    return ends


def needs_of(losses: Losses) -> frozenset[str]:
    """The optional statistics that any of the losses is a function of."""
    return frozenset().union(*(loss.needs for loss in losses.values()))


def _at_scale(batch: BatchKwargs, scale: float) -> BatchKwargs:
    """The batch for a loss of the logits times `scale`."""
    return batch if scale == 1 else batch.replace(temperature=batch.temperature / scale)


def check_is_batch(batch: BatchKwargs) -> None:
    """Refuses what a caller without type checks passes instead."""
    if not isinstance(batch, BatchKwargs):
        raise TypeError(
            f"`batch` must be a BatchKwargs, got a {type(batch).__name__}; a TokenBatch gives"
            " one by `to_kwargs`."
        )


def own_tokens(batch: BatchKwargs, groups: ParallelGroups) -> BatchKwargs:
    """The tokens of this rank's head: its slice where the head splits them.

    Raises:
        ValueError: they cannot be split.
    """
    if not head_splits_tokens(groups):
        return batch
    size, rank = group_size(groups.sp), group_rank(groups.sp)
    step, remainder = divmod(batch.num_tokens, size)
    if remainder:
        raise ValueError(
            f"`batch` must have a multiple of {size} tokens under sequence parallelism, got"
            f" {batch.num_tokens}; pack with `pad_to_multiple`."
        )
    return batch.span(rank * step, (rank + 1) * step)
