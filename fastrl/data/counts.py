"""Counts over the optimizer step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.data.prompt_groups import count_group_labels
from fastrl.functional.streams import STREAMS
from fastrl.parallel import ParallelGroups

if TYPE_CHECKING:
    from fastrl.data.batch import TokenBatch


@dataclass(frozen=True)
class BatchCounts:
    """What the losses of one optimizer step are divided by: over all data ranks and micro-batches.

    Attributes:
        num_labels_in_batch: shifted labels; the first token of a document is never one.
        num_documents_in_batch: documents with at least one label.
        num_groups_in_batch: groups with at least one label. A group is whole on its data rank.
        streams: labels, and documents with one, of each stream; 0 of one without weights.
        group_labels: labels of each group on this data rank, by its id; without, batches carry no
            groups.
        num_positive_labels_in_batch: labels with an advantage above 0.

    The numbers are int64 scalars on the device where an all-reduce ran on a GPU, so that nothing
    waits for it.
    """

    num_labels_in_batch: int | Tensor
    num_documents_in_batch: int | Tensor
    num_groups_in_batch: int | Tensor = field(default=0, compare=False)
    group_labels: Mapping[Hashable, int] | None = field(default=None, compare=False)
    num_positive_labels_in_batch: int | Tensor = field(default=0, compare=False)
    streams: Mapping[str, tuple[int | Tensor, int | Tensor]] = field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(
        cls,
        batches: Sequence[TokenBatch],
        groups: ParallelGroups | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> BatchCounts:
        """Counts of all micro-batches of a step, summed over `groups.dp` in one all-reduce.

        Every rank of the data axis must call it, also with no batch. The ranks of the other axes
        hold the same documents and need no collective.

        Args:
            batches: this data rank's micro-batches of the step.
            groups: only `dp` is used.
            device: where the all-reduce runs; default: the current GPU for NCCL, else the CPU.
        """
        labels = sum(batch.num_labels for batch in batches)
        documents = sum(batch.num_documents_with_labels for batch in batches)
        positive = sum(batch.num_positive_labels for batch in batches)
        group_labels, groups_with_labels = count_group_labels(
            (batch.group_ids, batch.document_label_counts.tolist())
            for batch in batches
            if batch.group_ids is not None
        )
        no_labels = torch.zeros(2, dtype=torch.int64)
        of_streams = [
            int(number)
            for stream in STREAMS
            for number in sum((batch.stream_totals(stream) for batch in batches), no_labels)
        ]
        group = None if groups is None else groups.dp
        if group is None:
            streams = _by_stream(of_streams)
            return cls(labels, documents, groups_with_labels, group_labels, positive, streams)
        if device is None:
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        numbers = [labels, documents, groups_with_labels, positive, *of_streams]
        counts = torch.tensor(numbers, dtype=torch.int64)
        if torch.device(device).type == "cuda":
            # From pageable memory the copy would wait for all that the GPU has to do.
            counts = counts.pin_memory()
        counts = counts.to(device, non_blocking=True)
        dist.all_reduce(counts, group=group)
        values = counts.tolist() if counts.device.type == "cpu" else counts.unbind()
        streams = _by_stream(values[4:])
        return cls(values[0], values[1], values[2], group_labels, values[3], streams)


def _by_stream(
    numbers: Sequence[int | Tensor],
) -> dict[str, tuple[int | Tensor, int | Tensor]]:
    """Labels and documents of each stream, from a list of both for one after the other."""
    return dict(zip(STREAMS, zip(numbers[::2], numbers[1::2], strict=True), strict=True))
