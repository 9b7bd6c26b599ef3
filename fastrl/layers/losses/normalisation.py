"""A loss as one number: per-token values divided by counts of the whole optimizer step."""

from __future__ import annotations

from torch import Tensor

from fastrl.config.loss_options import LossConfig, Stream
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.streams import weighted_in_stream


def normalised(values: Tensor, batch: BatchKwargs, config: LossConfig) -> Tensor:  # [T]
    """The scalar loss of per-token values, 0 at slots without label, by `config.normalisation`."""
    values = weighted_tokens(values, batch, config.stream)
    if config.normalisation == "tokens":
        return values.sum() / at_least_one(batch.num_labels_in_batch)
    if config.normalisation == "groups":
        counts = batch.group_label_counts
        assert counts is not None
        return (values / counts.clamp(min=1)).sum() / at_least_one(batch.num_groups_in_batch)
    documents = at_least_one(batch.num_documents_in_batch)
    if config.normalisation == "documents":
        return (values / batch.label_counts.clamp(min=1)).sum() / documents
    assert config.length is not None
    return values.sum() / (documents * config.length)


def weighted_tokens(values: Tensor, batch: BatchKwargs, stream: Stream | None) -> Tensor:  # [T]
    """Per-token values, times the weights of the stream and of labels that were drawn from more."""
    return draw_weighted(weighted_in_stream(values, batch, stream), batch)


def draw_weighted(values: Tensor, batch: BatchKwargs) -> Tensor:  # [..., T]
    """Per-token values, times the weights of labels that were drawn from more."""
    return values if batch.draw_weights is None else values * batch.draw_weights


def at_least_one(count: int | Tensor) -> int | Tensor:
    """`count`, or 1 for a step without labels, whose sums are 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
