"""Memory of the head: its strategy, and the tensors alive at its peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fastrl.config.losses import AnyLossConfig, HeadOptions
from fastrl.functional.head.extra_statistics import STATISTIC_NAMES
from fastrl.functional.head.full_rows import TENSORS_PER_CHUNK
from fastrl.functional.head.replay_gradients import GRADIENT_ELEMENTS
from fastrl.functional.head.tiling import (
    BLOCK_COLUMNS,
    even_chunk,
    recompute_tiling,
    single_pass_rows,
    spans,
)
from fastrl.kernels.arguments import MAX_PARTIAL_BYTES
from fastrl.layers.head_plan import HeadRows, OperandFacts, chunk_ends, needs_of
from fastrl.layers.losses import LanguageModelLoss, build_loss

# Most tensors of a chunk's size in fp32 during the search of a keep-set among 64-bit keys.
_TENSORS_OF_SEARCH = 18
# Entries that a sampler recorded for a token, as many as top-p of 0.97 leaves on average, and the
# approximate bytes of each in the vectors of `replay`.
_RECORDED_ENTRIES = 8
_ENTRY_BYTES = 128
# Approximate bytes of a row in the vectors of losses, metrics and statistics (fp32, int64).
_ROW_BYTES = 128


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, alive at the same time as others."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class HeadShape:
    """One rank's head and the rows that enter it.

    Attributes:
        tokens: T; all tokens where ranks that share the vocabulary hold slices.
        slice: tokens of this rank's hidden states.
        labelled: rows with a label.
        active: rows that carry gradient.
        columns: rows of the weight on this rank.
        hidden_size: D.
        dtype: of hidden states and weight.
        is_cut: whether documents are split over ranks or micro-sequences.
        shares_vocabulary: whether other ranks hold the rest of the weight's rows.
    """

    tokens: int
    slice: int
    labelled: int
    active: int
    columns: int
    hidden_size: int
    dtype: torch.dtype
    is_cut: bool = False
    shares_vocabulary: bool = False

    @property
    def narrow(self) -> int:
        """Bytes of an element of hidden states and weight."""
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of an element of sums over tokens or over the vocabulary."""
        return max(self.narrow, 4)

    @property
    def is_fused(self) -> bool:
        """Whether a Hopper GPU keeps no fp32 logits (`kernels.can_run_fused`)."""
        return self.narrow == 2 and self.hidden_size % 8 == 0

    def gathered(self) -> list[Memory]:
        """Gathered hidden states, where this rank has a slice of them."""
        if self.slice == self.tokens:
            return []
        return [Memory(_GATHERED, self.tokens * self.hidden_size * self.narrow)]


@dataclass(frozen=True)
class HeadOp:
    """One differentiable operation of the head, over all its rows.

    Attributes:
        what: text of the losses, the strategy and its chunks.
        is_single_pass: the strategy.
        forward: at the peak of the forward, results included.
        kept: from the forward to the backward.
        backward: at the peak of the backward, results included, `kept` left out.
    """

    what: str
    is_single_pass: bool
    forward: Sequence[Memory]
    kept: Sequence[Memory]
    backward: Sequence[Memory]


_GATHERED = "head: hidden states of all tensor ranks"
_LOGITS = "head: exponentials or logits of a chunk"
_TILE = "head: tile of the gradient of logits"
_PARTIAL = "head: partial statistics"
_ROWS = "head: rows of hidden states and of their gradient"
_GRAD_HIDDEN = "head: gradient of hidden states"
_GRAD_WEIGHT = "head: gradient of the weight"
_SUM_WEIGHT = "head: sum of the weight's gradient in fp32"
_VECTORS = "head: statistics and losses of rows"


def total(items: Sequence[Memory]) -> int:
    """Total bytes of the items."""
    return sum(item.num_bytes for item in items)


def largest(*moments: Sequence[Memory]) -> Sequence[Memory]:
    """The moment with the most bytes."""
    return max(moments, key=total)


def head_ops(
    options: HeadOptions, losses: Mapping[str, AnyLossConfig], shape: HeadShape
) -> list[HeadOp]:
    """The operations of a training forward, in their order (`LanguageModelHead.forward`).

    Raises:
        ValueError: the chosen strategy is not possible.
    """
    ops: list[HeadOp] = []
    scales = sorted({loss.logits_scale for loss in losses.values()}, key=lambda s: (s != 1, s))
    for scale in scales:
        built = {
            name: build_loss(loss) for name, loss in losses.items() if loss.logits_scale == scale
        }
        ops += _pass_ops(options, built, shape)
    return ops


def _pass_ops(
    options: HeadOptions, losses: Mapping[str, LanguageModelLoss[Any]], shape: HeadShape
) -> list[HeadOp]:
    """The operations of losses that share their logits."""
    itemsize = 2 if shape.is_fused and shape.dtype == torch.bfloat16 else shape.wide
    rows = HeadRows(shape.tokens, shape.active, None, shape.is_cut)
    ends = chunk_ends(options, losses, rows, shape.columns, OperandFacts(shape.dtype, itemsize))
    names = ", ".join(losses)
    if ends is not None:
        return [_single_pass(names, ends, itemsize, shape)]
    if options.keep is None:
        ops = [_recompute(names, options, shape)]
    elif options.keep.recorded:
        ops = [_replay(f"{names}: recorded entries", shape)]
    else:
        what = f"{names}: keep-set, recompute"
        return [_full_rows(what, options, shape, _TENSORS_OF_SEARCH)]
    if needs_of(losses) & frozenset(STATISTIC_NAMES):
        ops.append(
            _full_rows(f"{names}: label smoothing, recompute", options, shape, TENSORS_PER_CHUNK)
        )
    return ops


def _single_pass(names: str, ends: Sequence[int], itemsize: int, shape: HeadShape) -> HeadOp:
    """`single_pass`: all gradients are formed in the forward."""
    most = max((stop - start for start, stop in pairwise([0, *ends])), default=0)
    weight = shape.columns * shape.hidden_size
    num_chunks = len(ends)
    is_summed = num_chunks > 1
    grad_weight = Memory(_GRAD_WEIGHT, weight * shape.narrow)
    in_chunks = Memory(_SUM_WEIGHT, weight * shape.wide) if is_summed else grad_weight
    # Products that are sent to other ranks live until the next chunk.
    num_products = 2 if is_summed and shape.shares_vocabulary else 1
    rows = most * shape.hidden_size * (shape.narrow + num_products * shape.wide)
    partial = 12 * -(-shape.columns // BLOCK_COLUMNS) * most if shape.is_fused else 0
    vectors = Memory(_VECTORS, _ROW_BYTES * shape.tokens)
    chunk = [
        *shape.gathered(),
        _sum_of_hidden(shape),
        in_chunks,
        Memory(_LOGITS, most * -(-shape.columns // 8) * 8 * itemsize),
        Memory(_PARTIAL, partial),
        Memory(_ROWS, rows),
        vectors,
    ]
    end = [*shape.gathered(), _sum_of_hidden(shape), in_chunks, vectors]
    if is_summed and shape.narrow != shape.wide:
        end.append(grad_weight)  # the rounded sum
    kept = [Memory(_GRAD_HIDDEN, shape.slice * shape.hidden_size * shape.narrow), grad_weight]
    chunks = f"{num_chunks} chunk" + "s" * (num_chunks != 1)
    what = f"{names}: single_pass, {chunks} of {most:,} rows"
    return HeadOp(what, True, largest(chunk, end), kept, [])


def _sum_of_hidden(shape: HeadShape) -> Memory:
    """The buffer of `HiddenGradient`."""
    is_sum = shape.slice != shape.tokens
    itemsize = shape.wide if is_sum else shape.narrow
    return Memory(_GRAD_HIDDEN, shape.tokens * shape.hidden_size * itemsize)


def _recompute(names: str, options: HeadOptions, shape: HeadShape) -> HeadOp:
    """`recompute`: statistics in the forward, logits again in the backward."""
    size, narrow, wide = shape.hidden_size, shape.narrow, shape.wide
    bounds = (options.chunk_size, options.max_logits_bytes)
    vectors = Memory(_VECTORS, _ROW_BYTES * shape.tokens)
    rows = Memory(_ROWS, shape.labelled * size * narrow)
    if shape.is_fused:
        tiles = -(-shape.columns // BLOCK_COLUMNS)
        work = Memory(_PARTIAL, min(12 * tiles * shape.labelled, MAX_PARTIAL_BYTES))
    else:
        tiling = recompute_tiling(shape.labelled, shape.columns, wide, *bounds)
        work = Memory(_TILE, tiling.num_rows * min(tiling.num_columns, shape.columns) * wide)
    forward = [*shape.gathered(), rows, work, vectors]

    itemsize = narrow if shape.is_fused else wide
    tiling = recompute_tiling(shape.active, shape.columns, itemsize, *bounds)
    num_columns = min(tiling.num_columns, shape.columns)
    compact = shape.active * size * wide
    grad_weight = Memory(_GRAD_WEIGHT, shape.columns * size * narrow)
    is_summed = len(spans(shape.active, tiling.num_rows)) != 1
    in_tiles = [
        Memory(_ROWS, shape.active * size * narrow + compact),
        grad_weight,
        Memory(_TILE, tiling.num_rows * num_columns * itemsize),
        Memory(_SUM_WEIGHT, num_columns * size * wide if is_summed else 0),
    ]
    end = [Memory(_ROWS, compact), grad_weight, _sum_of_hidden(shape)]
    return HeadOp(f"{names}: recompute", False, forward, [vectors], largest(in_tiles, end))


def _replay(what: str, shape: HeadShape) -> HeadOp:
    """`replay`: no logits, and the weight's gradient."""
    size, narrow = shape.hidden_size, shape.narrow
    num_entries = shape.tokens + shape.labelled * _RECORDED_ENTRIES
    vectors = Memory(_VECTORS, _ROW_BYTES * shape.tokens + _ENTRY_BYTES * num_entries)
    forward = [*shape.gathered(), vectors]
    chunk = min(shape.active * size, GRADIENT_ELEMENTS) * shape.wide
    backward = [
        *shape.gathered(),
        Memory(_ROWS, chunk if shape.shares_vocabulary else 0),
        Memory(_GRAD_WEIGHT, shape.columns * size * narrow),
        _sum_of_hidden(shape),
        vectors,
    ]
    return HeadOp(what, False, forward, [vectors], backward)


def _full_rows(what: str, options: HeadOptions, shape: HeadShape, num_tensors: int) -> HeadOp:
    """`full_rows`: whole rows of logits, `num_tensors` of a chunk's size at most."""
    size, wide = shape.hidden_size, shape.wide
    bounds = (options.chunk_size, options.max_logits_bytes)
    most = single_pass_rows(shape.columns, TENSORS_PER_CHUNK * wide, *bounds)
    num_rows = even_chunk(shape.labelled, most)
    chunk = num_rows * shape.columns * wide
    logits = [*shape.gathered(), Memory(_LOGITS, num_tensors * chunk)]
    weight = shape.columns * size * wide
    results = [_sum_of_hidden(shape), Memory(_SUM_WEIGHT, weight)]
    # The weight is widened for each product.
    product = [
        *shape.gathered(),
        *results,
        Memory(_LOGITS, chunk),
        Memory("head: weight in fp32", 0 if shape.narrow == wide else weight),
    ]
    return HeadOp(what, False, logits, [], largest([*logits, *results], product))
