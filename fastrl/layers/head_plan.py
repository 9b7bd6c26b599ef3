"""Which rows of a batch enter the head, and in which chunks: decided on the host.

Nothing here waits for the device, but for batches made by hand without row sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastrl.config.losses import LanguageModelHeadConfig
from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.functional.head.extra_statistics import STATISTIC_NAMES
from fastrl.functional.head.tiling import SINGLE_PASS_MIN_ROWS, chunk_rows, single_pass_rows
from fastrl.layers.losses import LanguageModelLoss
from fastrl.parallel import ParallelGroups, group_rank, group_size, vocab_shard

Losses = Mapping[str, LanguageModelLoss[Any]]


def weight_rows(config: LanguageModelHeadConfig) -> int:
    """Rows of the whole weight, padding included."""
    return config.padded_vocab_size or config.vocab_size


def head_splits_tokens(groups: ParallelGroups) -> bool:
    """Whether the ranks of `sp` hold different tokens, also in the head."""
    return groups.sp is not None and groups.tp is None


def sequence_slice(batch: BatchKwargs, groups: ParallelGroups) -> BatchKwargs:
    """This rank's tokens under sequence parallelism with a replicated weight."""
    size, rank = group_size(groups.sp), group_rank(groups.sp)
    step, remainder = divmod(batch.num_tokens, size)
    if remainder:
        raise ValueError(
            f"`batch` must have a multiple of {size} tokens under sequence parallelism, got"
            f" {batch.num_tokens}; pack with `pad_to_multiple`."
        )
    return batch.span(rank * step, (rank + 1) * step)


def labelled_rows(batch: BatchKwargs) -> RowSet:
    """Rows with a label; found on the device, which waits for it, in hand-made batches."""
    if batch.labelled_rows is not None:
        return batch.labelled_rows
    rows = RowSet.from_mask((batch.labels != -100).cpu(), batch.document_index.cpu())
    return rows.to(batch.labels.device)


def gradient_rows(batch: BatchKwargs, losses: Losses) -> RowSet:
    """Rows that some loss has a value or gradient at: the largest of nested sets."""
    sets = [loss.gradient_rows(batch) for loss in losses.values()]
    known = [rows for rows in sets if rows is not None]
    if len(known) < len(sets):
        return labelled_rows(batch)
    return max(known, key=len)


def single_pass_chunks(
    config: LanguageModelHeadConfig,
    groups: ParallelGroups,
    batch: BatchKwargs,
    rows: RowSet,
    losses: Losses,
    dtype: torch.dtype,
    itemsize: int,
) -> list[int] | None:
    """Ends of the chunks of `single_pass`, or None for `recompute`.

    Decided by facts that all ranks share which take part in the head's collectives. A chunk's
    logits take `itemsize` bytes an element, hidden states and weight are of `dtype`.
    """
    if config.strategy == "recompute":
        return None
    columns = vocab_shard(weight_rows(config), 0, group_size(groups.tp))[1]
    bounds = (columns, itemsize, config.chunk_size, config.max_logits_bytes)
    scopes = {loss.scope for loss in losses.values()}
    needs = frozenset[str]().union(*(loss.needs for loss in losses.values()))
    chunk_ends: list[int] | None = None
    reason = None
    if config.keep is not None or needs & frozenset(STATISTIC_NAMES):
        reason = "`keep` and label smoothing take a pass over the logits of their own"
    elif scopes & {"group", "batch"}:
        reason = "pairs and entropy quantiles need tokens outside of a chunk"
    elif "document" not in scopes:
        chunk_ends = chunk_rows(len(rows), *bounds)
    elif groups.sdp is not None or head_splits_tokens(groups) or not batch.whole_documents:
        reason = "documents are split over ranks or micro-sequences"
    else:
        chunk_ends = chunk_rows(len(rows), *bounds, rows.document_ends)
        reason = "a document has more rows than `chunk_size` or `max_logits_bytes` admit"
    if chunk_ends is None and config.strategy == "single_pass":
        raise ValueError(
            f"`strategy: single_pass` must have all that a loss needs in a chunk for the losses"
            f" {list(losses)}, but {reason}; use `strategy: auto` or `recompute`."
        )
    has_few_rows = single_pass_rows(*bounds) < min(batch.num_tokens, SINGLE_PASS_MIN_ROWS)
    # `single_pass` rounds dz before a loss scale is known, and in fp16 small gradients underflow.
    if config.strategy == "auto" and (has_few_rows or dtype == torch.float16):
        return None
    return chunk_ends
