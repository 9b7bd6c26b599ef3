"""Streams: parts of a step's labels with weights and counts of their own."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from fastrl.config.loss_options import Stream

if TYPE_CHECKING:
    from fastrl.functional.batch import BatchKwargs

STREAMS: tuple[Stream, ...] = get_args(Stream)
"""Their names; the weights of one are the column `<name>_weights` of a batch. They are fixed, so
that all ranks sum as many counts."""


# Not frozen, as `RowSet` says.
@dataclass(eq=False, kw_only=True)
class StreamCounts:
    """What stands for the counts of a batch in one of its streams.

    Attributes:
        label_counts: [T] labels of the slot's whole document in the stream, those with a weight
            that is not 0; 0 at padding.
        num_labels_in_batch: such labels of the optimizer step: all data ranks and micro-batches.
        num_documents_in_batch: documents with such a label.
    """

    label_counts: Tensor  # [T]
    num_labels_in_batch: int | Tensor
    num_documents_in_batch: int | Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> StreamCounts:
        """The counts with `function` applied to each tensor."""
        tensors = {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **{name: function(each) for name, each in tensors.items()})

    def __getitem__(
        self,
        index: Tensor | slice,  # [R]
    ) -> StreamCounts:
        """Those of R slots."""
        return replace(self, label_counts=self.label_counts[index])


def of_stream(batch: BatchKwargs, stream: Stream | None) -> BatchKwargs:
    """The batch as a loss of the stream sees it: its labels, and its counts in place of all.

    None is the stream of all labels, and gives the batch itself. A loss is called with the batch of
    its stream, `of_stream(batch, loss.config.stream)`, as the head does.

        labels_t = labels_t where weight_t != 0, else -100

    Weights are a factor on a token's loss where it is normalised and change no count. Row sets stay
    those of all labels, which hold the stream's.

    Raises:
        ValueError: the batch carries no weights of the stream, or no counts of it.
    """
    if stream is None:
        return batch
    name = f"{stream}_weights"
    weights, counts = getattr(batch, name), batch.stream_counts.get(stream)
    if weights is None:
        raise ValueError(
            f"`{name}` must be in the batch for a loss of `stream: {stream}`, got None; give each"
            f" Document `{name.removesuffix('s')}`, 0 where it is not in the stream"
        )
    if counts is None:
        raise ValueError(
            f"`stream_counts` must have {stream!r} beside `{name}`, got"
            f" {sorted(batch.stream_counts)}; a TokenBatch's `to_kwargs` makes them"
        )
    # A copy leaves vectors that nobody has read where they are, as `select` does.
    changed = copy(batch)
    vars(changed).update(
        labels=torch.where(weights != 0, batch.labels, -100),
        label_counts=counts.label_counts,
        num_labels_in_batch=counts.num_labels_in_batch,
        num_documents_in_batch=counts.num_documents_in_batch,
        stream=stream,
    )
    return changed


def weighted_in_stream(
    values: Tensor,  # [T]
    batch: BatchKwargs,
    stream: Stream | None,
) -> Tensor:  # [T]
    """Per-token values of a loss times the weights of its stream, if it has one.

    Raises:
        ValueError: the batch is not that of the stream.
    """
    if batch.stream != stream:
        raise ValueError(
            f"`batch` must be that of `stream: {stream}`, which the loss has, got that of"
            f" {batch.stream}; call the loss with `of_stream(batch, loss.config.stream)` of"
            " fastrl.functional.streams"
        )
    if stream is None:
        return values
    weights: Tensor = getattr(batch, f"{stream}_weights")
    return values * weights
