"""One optimizer step: its micro-batches, what their losses are divided by, and their metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.data.batch import BatchCounts, TokenBatch
from fastrl.data.columns import BATCH_COLUMNS
from fastrl.data.documents import Document, DocumentError
from fastrl.data.drafts import draft_batch
from fastrl.data.equal_batches import equal_batches
from fastrl.data.packing import pack_numbers
from fastrl.data.prefixes import check_not_split
from fastrl.data.slices import Layout
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.metrics import add_metrics, reduce_metrics, wide
from fastrl.parallel import ParallelGroups, group_size


class StepOutput(Protocol):
    """What a head gives for a micro-batch: `HeadOutput`, or what looks like one."""

    @property
    def loss(self) -> Tensor | None:
        """This rank's part of the step's loss, a scalar."""

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """Detached scalars that add up over micro-batches and ranks."""


class OptimizerStep:
    """The micro-batches of one optimizer step on this data rank, and the counts of the whole step.

        loss of the step = sum over data ranks and micro-batches of the losses of their batches

    A loss is a sum over tokens divided by a count of the step, so a micro-batch needs the counts of
    all: the batches that come from here have them, and their gradients add up to those of one pass
    over all documents. Losses and gradients must be summed over micro-batches and data ranks, never
    averaged.

        step = OptimizerStep.from_documents(documents, max_tokens=16384, groups=groups)
        for batch in step:
            output = head(model(batch), batch)
            output.loss.backward()
            step.add(output)
        optimizer.step()
        metrics = step.finish(head.loss_groups)

    A step can be run again, as the epochs of PPO do.

    Args:
        batches: this data rank's micro-batches, in order; may be empty. All data ranks must have
            equally many with the same columns where collectives run in each pass (FSDP, DDP), and
            one at least to reduce metrics; `from_documents` sees to it.
        groups: `dp` for the counts, `sdp` and `sp` as in `TokenBatch.to_kwargs`. Every data rank
            must make its step, as their counts are summed in one all-reduce.
        device: of the batches that are given out. Default: the CPU.
        layout: of a sequence over the sequence-data ranks, see `shard_slots`.

    Attributes:
        batches: the micro-batches.
        counts: of the whole step.

    Raises:
        TypeError: something else than token batches.
    """

    def __init__(
        self,
        batches: Sequence[TokenBatch],
        groups: ParallelGroups | None = None,
        *,
        device: torch.device | str | None = None,
        layout: Layout = "contiguous",
    ) -> None:
        self.batches = tuple(_checked("batches", batches, TokenBatch))
        self.counts = BatchCounts.of(self.batches, groups)
        self._groups = groups
        self._device = device
        self._layout: Layout = layout
        self._parts: list[dict[str, Tensor]] = []
        # The number of each batch's documents among those that the step was made from.
        ends = [0]
        for batch in self.batches:
            ends.append(ends[-1] + batch.num_documents)
        self._numbers = [list(range(*ends[i : i + 2])) for i in range(len(self.batches))]

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        max_tokens: int,
        groups: ParallelGroups | None = None,
        *,
        pad_to_multiple: int = 1,
        columns: Collection[str] | None = None,
        device: torch.device | str | None = None,
        layout: Layout = "contiguous",
        share_prefixes: bool = False,
    ) -> OptimizerStep:
        """The step of this data rank's documents, packed into as few micro-batches as fit.

        All data ranks get equally many micro-batches that carry the same columns: ranks with fewer
        get empty ones, which have no document and count nowhere. They agree on it in one more
        all-reduce, whose result the host waits for. Without `groups.dp` there is none.

        Args:
            documents: of this data rank, any number; the ranks of its other axes give the same.
            max_tokens: of a micro-batch, at least those of the longest document.
            groups: see the class.
            pad_to_multiple: lengths are padded to a multiple of it.
            columns: as in `TokenBatch.from_documents`. Default: those that any document of any data
                rank has.
            device: see the class.
            layout: see the class.
            share_prefixes: as in `TokenBatch.from_documents`; the documents of a group stay in one
                micro-batch where they fit.

        Raises:
            DocumentError: (a ValueError) naming the document and the field.
            ValueError: a column that labelled documents of some data ranks have and of others lack,
                or `share_prefixes` with sequence-data ranks.
        """
        documents = _checked("documents", documents, Document)
        if share_prefixes and groups is not None:
            check_not_split(group_size(groups.sdp), 1)
        packs = pack_numbers(documents, max_tokens, share_prefixes=share_prefixes)
        if columns is None:
            columns = [
                name
                for name, field in BATCH_COLUMNS.items()
                if any(getattr(document, field) is not None for document in documents)
            ]
        options = {"pad_to_multiple": pad_to_multiple, "share_prefixes": share_prefixes}
        batches = [_packed(documents, numbers, columns, options) for numbers in packs]
        if all(document.reward is None for document in documents):
            # The data ranks agree on it below; the names of columns bring rewards of NaN.
            batches = [replace(batch, rewards=None) for batch in batches]
        batches = equal_batches(batches, groups, pad_to_multiple=pad_to_multiple)
        step = cls(batches, groups, device=device, layout=layout)
        step._numbers = packs + [[]] * (len(batches) - len(packs))
        return step

    def draft(self, depth: int) -> OptimizerStep:
        """The step of the draft heads of a depth: the same micro-batches, as `draft_batch`.

        Its counts are those of the depth's own labels, in one more all-reduce over `groups.dp`.
        Its batches go with those of this step one by one:

            for batch, *drafts in zip(step, step.draft(1), step.draft(2)):
        """
        batches = [draft_batch(batch, depth) for batch in self.batches]
        step = OptimizerStep(batches, self._groups, device=self._device, layout=self._layout)
        step._numbers = self._numbers
        return step

    def __len__(self) -> int:
        """Micro-batches of this rank."""
        return len(self.batches)

    def __iter__(self) -> Iterator[BatchKwargs]:
        """Yields this rank's part of each micro-batch, on the device."""
        for batch in self.batches:
            yield from self.to_kwargs(batch)

    def to_kwargs(
        self, batch: TokenBatch, micro_sequences: int = 1, *, join: bool = False
    ) -> tuple[BatchKwargs, ...]:
        """`TokenBatch.to_kwargs` of one of the step's micro-batches, with the step's counts.

        Args:
            batch: one of `batches`.
            micro_sequences: number of pieces that the sequence is run in, in order.
            join: give all pieces as one.
        """
        return batch.to_kwargs(
            self._groups,
            micro_sequences,
            layout=self._layout,
            join=join,
            counts=self.counts,
            device=self._device,
        )

    def add(self, output: StepOutput, *others: StepOutput) -> None:
        """Takes the loss and the metrics of a micro-batch; to be called once for each.

        Args:
            output: of the head for the micro-batch, or for its first micro-sequence.
            others: those of its other micro-sequences.

        Raises:
            ValueError: an output without a loss.
        """
        parts = [_metrics(each) for each in (output, *others)]
        self._parts.append(add_metrics(parts) if others else parts[0])

    def finish(self, loss_groups: Sequence[ProcessGroup | None]) -> dict[str, Tensor]:
        """The metrics of the whole step, among them `loss`; the step can then be run again.

        Args:
            loss_groups: over whose ranks losses and metrics add up: `head.loss_groups`.

        Returns:
            Scalars on the device, equal on all ranks: `reduce_metrics` of the micro-batches' sums.

        Raises:
            ValueError: not as many outputs as micro-batches were added.
        """
        if len(self._parts) != len(self.batches):
            raise ValueError(
                f"`add` must be called once for each of the {len(self.batches)} micro-batches"
                f" before `finish`, got {len(self._parts)} calls."
            )
        metrics = reduce_metrics(add_metrics(self._parts), loss_groups)
        self._parts.clear()
        return metrics

    def split_by_document(
        self,
        values: Sequence[Tensor],  # [T] each
    ) -> tuple[Tensor, ...]:
        """Label-aligned values of the micro-batches, [n - 1] for each document of n tokens.

        In the order of the documents that the step was made from, as `padded_from_documents` and
        `Document` with `alignment="label"` take them.

        Args:
            values: for each micro-batch one a slot of its whole packed sequence, such as
                `HeadOutput.logprobs`; not for sequences that are split over ranks.
        """
        if len(values) != len(self.batches):
            raise ValueError(
                f"`values` must have one tensor a micro-batch ({len(self.batches)}), got"
                f" {len(values)}"
            )
        pieces = [
            batch.split_by_document(value[: batch.padded_length])
            for batch, value in zip(self.batches, values, strict=True)
        ]
        numbers = list(chain.from_iterable(self._numbers))
        by_number = dict(zip(numbers, chain.from_iterable(pieces), strict=True))
        return tuple(by_number[number] for number in range(len(numbers)))


def _metrics(output: StepOutput) -> dict[str, Tensor]:
    """The metrics of an output with its loss."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return {"loss": wide(loss.detach()), **output.metrics}
    if loss is None and hasattr(output, "metrics"):
        raise ValueError(
            "`loss` of the output must be a tensor, got None, as of a head in evaluation mode; call"
            " `train()` of the head before the step."
        )
    raise TypeError(
        f"`output` must be what the head gives, with `loss` and `metrics`, got a {_kind(output)}"
    )


def _packed(
    documents: Sequence[Document],
    numbers: Sequence[int],
    columns: Collection[str],
    options: Mapping[str, Any],
) -> TokenBatch:
    """The batch of some of the documents; an error names their number among all."""
    pack = [documents[number] for number in numbers]
    try:
        return TokenBatch.from_documents(pack, columns=columns, **options)
    except DocumentError as error:
        raise DocumentError(numbers[error.number], error.field, error.problem) from None


ValueT = TypeVar("ValueT")


def _checked(name: str, values: Sequence[ValueT], kind: type[ValueT]) -> list[ValueT]:
    """The values as a list; refuses one that is no `kind`, or a `kind` in place of a list."""
    items = list(values) if isinstance(values, Iterable) else [values]
    wrong = [item for item in items if not isinstance(item, kind)]
    if wrong or not isinstance(values, Iterable):
        got = _kind(wrong[0] if wrong else values)
        raise TypeError(f"`{name}` must be a sequence of {kind.__name__}, got a {got}")
    return items


def _kind(value: object) -> str:
    return type(value).__name__
