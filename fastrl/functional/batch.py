"""The input of a model and its head: one rank's (micro-)sequence in label alignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.config.loss_options import Stream
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.row_checks import check_row_sets
from fastrl.functional.streams import StreamCounts
from fastrl.functional.transfer import send


def _int64(source: str | None = None) -> Mapping[str, str | None]:
    """Metadata of an int64 [T] field and the field of `Document` that gives it, if one does."""
    return {"dtype": "int64", "source": source}


def _float(source: str | None = None) -> Mapping[str, str | None]:
    """Metadata of a floating-point [T] field, as `_int64`."""
    return {"dtype": "floating-point", "source": source}


# Immutable by convention, not frozen: torch.compile of torch 2.11 guards on every field of a frozen
# dataclass, and the number of documents would cost a recompile for every batch.
@dataclass(eq=False, kw_only=True)
class RowSet:
    """A subset of a shard's rows, known on the host: using it needs no device synchronisation.

    Attributes:
        index: [R] int64, increasing.
        document_ends: cumulative number of rows at the end of each document of this shard that has
            a row; the last is R. Empty without rows.
        host_index: `index` on the CPU. Default: a copy of `index`, which synchronises if it is on
            a device.
    """

    index: Tensor  # [R]
    document_ends: tuple[int, ...]
    host_index: Tensor = None  # type: ignore[assignment] # [R], set below

    def __post_init__(self) -> None:
        if self.host_index is None:
            self.host_index = self.index.cpu()

    def __len__(self) -> int:
        return self.index.shape[0]

    @classmethod
    def from_mask(
        cls,
        mask: Tensor,  # [T]
        document_index: Tensor,  # [T]
    ) -> RowSet:
        """The rows where `mask` is True. Both tensors are on the CPU."""
        index = mask.nonzero().squeeze(1)
        documents = document_index[index]
        inner = (documents[1:] != documents[:-1]).nonzero().squeeze(1) + 1
        ends = [*inner.tolist(), len(index)] if len(index) else []
        return cls(index=index, document_ends=tuple(ends))

    def within(self, start: int, stop: int) -> RowSet:
        """The rows in [start, stop), counted from `start`: those of a slice of the shard."""
        bounds = torch.searchsorted(self.host_index, torch.tensor([start, stop])).tolist()
        first, last = bounds
        ends = [min(end, last) - first for end in self.document_ends if end > first]
        inside = ends[: ends.index(last - first) + 1] if last > first else []
        return RowSet(
            index=self.index[first:last] - start,
            document_ends=tuple(inside),
            host_index=self.host_index[first:last] - start,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RowSet:
        """The same rows with their index on `device`."""
        return replace(self, index=self.index.to(device, non_blocking=non_blocking))


@dataclass(eq=False)
class LabelFacts:
    """What the host knows of a batch's labels, as long as they are the same, unchanged.

    Attributes:
        labels: [T] of the batch.
        bound: above all of them, which are else -100 or at least 0.
        all_labelled: whether every slot has a label.
    """

    labels: Tensor  # [T]
    bound: int
    all_labelled: bool = False

    def __post_init__(self) -> None:
        self._version = _version(self.labels)

    def hold_of(self, labels: Tensor) -> bool:
        """Whether they are these labels, in which nothing was written since."""
        return labels is self.labels and _version(labels) == self._version


@dataclass(eq=False)
class PrefixFacts:
    """What the host knows of slots that documents share, as long as the batch has these.

    Attributes:
        visible_until: [T] of the batch.
        host: [T] on the CPU: the same at documents. Padding, which no one reads, is documents of at
            most the longest one's slots there, as one for each of its slots would cost attention.
    """

    visible_until: Tensor  # [T]
    host: Tensor  # [T]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True, kw_only=True)
class BatchKwargs:
    """One sequence-data rank's (micro-)sequence of T tokens; slot t belongs to `labels[t]`.

    Attributes:
        tokens: [T] int64, 0 at padding.
        positions: [T] int64 inside the document; at padding they count from 0.
        labels: [T] int64, the token that slot t must predict; -100 = none. The only mask.
        document_index: [T] int64, the same number on every rank that holds a piece; -1 = padding.
        label_counts: [T] fp32, labels of the whole document of the slot, over all shards; 0 at
            padding.
        num_documents: documents of the whole packed sequence, with labels or not: the size of
            per-document buffers on all its ranks.
        num_labels_in_batch: labels of the optimizer step: all data ranks, all micro-batches.
        num_documents_in_batch: documents with a label of the optimizer step.
        num_positive_labels_in_batch: labels of the optimizer step with an advantage above 0; None
            in batches made by hand, which losses of these labels refuse.
        advantages: [T] fp32 (float64 of float64 documents, as all that is fp32 here but for
            counts), 0 at slots without label, as in the five that follow.
        old_logprobs: [T] fp32 nats, denominator of the ratio.
        ref_logprobs: [T] fp32 nats, under the frozen reference.
        rollout_logprobs: [T] fp32 nats, the sampler's own.
        values: [T] fp32, of the value head that the advantages were taken with.
        returns: [T] fp32, what the value head is to predict.
        draw_weights: [T] fp32, factor on what a token adds to losses and means, where its label
            was drawn at random from more (`with_sampled_tokens`); 0 without label. None is 1.
        rl_weights: [T] fp32 at least 0, in the stream `rl`; 0 where a label is not in it, and at
            slots without label, as in the two that follow.
        ce_weights: [T] fp32, in the stream `ce`.
        distill_weights: [T] fp32, in the stream `distill`.
        temperature: one number (or tensor []) if all documents share it, else [T] fp32, 1 at
            padding.
        model_version: [T] int64, -1 where there is none (padding, documents without label).
        rewards: [num_documents] fp32, NaN = none, for metrics.
        current_version: of the weights being trained; for staleness.
        group_index: [T] int64, 0-based number of the document's group in the packed sequence, the
            same on every rank that holds a piece; -1 = padding. None without groups.
        group_label_counts: [T] fp32, labels of the slot's whole group over the step's batches on
            this data rank; 0 at padding.
        num_groups: groups of the whole packed sequence: the size of per-group buffers.
        num_groups_in_batch: groups with a label of the optimizer step.
        kept_tokens: the entries that the sampler drew each label from, for
            `KeepSetConfig.recorded`. Given as [T, K] int64, padded with -1, they become
            `KeptTokens`. Documents without any entry are over the whole vocabulary.
        teacher_tokens: a teacher's most probable entries at each label with their
            log-probabilities, for `DistillationLossConfig.recorded`.
        labelled_rows: rows with a label.
        active_rows: labelled rows whose advantage is not 0; None without advantages.
        active_document_rows: labelled rows of documents that have a labelled advantage other than 0
            anywhere, also in another shard; None without advantages.
        unrecorded_rows: labelled rows of documents without `kept_tokens`; None without them, and in
            batches made by hand.
        whole_documents: no document with a label is cut by this split of the packed sequence: the
            same on all its sequence-data ranks and micro-sequences, so that the choice of
            collectives may depend on it.
        max_document_length: tokens of the longest document of the whole packed sequence, a host
            number as attention over documents takes it; padding, which is none, may be longer. 0
            without documents, None in batches made by hand.
        visible_until: [T] int64, where documents share the slots of a common prefix: slot q sees
            slot k if k <= q < visible_until[k]. A shared slot has no label; its `document_index`
            is that of one of its documents. None where no slot is shared: a slot then sees those of
            its document up to itself.
        prefix_facts: what the host knows of `visible_until`, where attention makes its plan; None
            in batches made by hand.
        cut_by_pieces: a document with a label continues in another micro-sequence of the split, so
            that sums over documents are not possible. The same on all ranks.
        target_rows: [T] int64, of a draft head's batch: the row of the slot whose label this slot
            must predict, among the hidden states of all sequence-data ranks, rank after rank; any
            without label.
        label_facts: what the host knows of the labels, which spares the head a look at them on the
            device; None in batches made by hand.
        stream_counts: counts of the streams that there are weights of, by their names.
        stream: that this batch is of (`of_stream`); None: of all labels.

    Row sets may be None (batches made by hand): consumers then derive the rows from `labels`.
    """

    tokens: Tensor = field(metadata=_int64())  # [T]
    positions: Tensor = field(metadata=_int64())  # [T]
    labels: Tensor = field(metadata=_int64())  # [T]
    document_index: Tensor = field(metadata=_int64())  # [T]
    label_counts: Tensor = field(metadata=_float())  # [T]
    num_documents: int
    num_labels_in_batch: int | Tensor
    num_documents_in_batch: int | Tensor
    num_positive_labels_in_batch: int | Tensor | None = None
    advantages: Tensor | None = field(default=None, metadata=_float("advantage"))  # [T]
    old_logprobs: Tensor | None = field(default=None, metadata=_float("logprobs"))  # [T]
    ref_logprobs: Tensor | None = field(default=None, metadata=_float("ref_logprobs"))  # [T]
    rollout_logprobs: Tensor | None = field(
        default=None, metadata=_float("rollout_logprobs")
    )  # [T]
    values: Tensor | None = field(default=None, metadata=_float("values"))  # [T]
    returns: Tensor | None = field(default=None, metadata=_float("returns"))  # [T]
    draw_weights: Tensor | None = field(default=None, metadata=_float())  # [T]
    rl_weights: Tensor | None = field(default=None, metadata=_float("rl_weight"))  # [T]
    ce_weights: Tensor | None = field(default=None, metadata=_float("ce_weight"))  # [T]
    distill_weights: Tensor | None = field(default=None, metadata=_float("distill_weight"))  # [T]
    temperature: float | Tensor = field(
        default=1.0, metadata=_float("temperature")
    )  # scalar or [T]
    model_version: Tensor | None = field(default=None, metadata=_int64("model_version"))  # [T]
    rewards: Tensor | None = None  # [num_documents]
    current_version: int | None = None
    group_index: Tensor | None = field(default=None, metadata=_int64("group_id"))  # [T]
    group_label_counts: Tensor | None = field(default=None, metadata=_float("group_id"))  # [T]
    num_groups: int = 0
    num_groups_in_batch: int | Tensor = 0
    kept_tokens: KeptTokens | Tensor | None = None
    teacher_tokens: KeptTokens | None = None
    labelled_rows: RowSet | None = None
    active_rows: RowSet | None = None
    active_document_rows: RowSet | None = None
    unrecorded_rows: RowSet | None = None
    whole_documents: bool = True
    cut_by_pieces: bool = False
    max_document_length: int | None = None
    visible_until: Tensor | None = field(default=None, metadata=_int64())  # [T]
    prefix_facts: PrefixFacts | None = None
    target_rows: Tensor | None = field(default=None, metadata=_int64())  # [T]
    label_facts: LabelFacts | None = None
    stream_counts: Mapping[str, StreamCounts] = field(default_factory=dict)
    stream: Stream | None = None

    def __post_init__(self) -> None:
        """Refuses vectors that do not belong together, which would otherwise broadcast."""
        shape = self.labels.shape
        for name, dtype in _DTYPES.items():
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                continue
            is_shared = name == "temperature" and value.ndim == 0
            if not is_shared and (value.shape != shape or value.ndim != 1):
                raise ValueError(
                    f"`{name}` must be of shape [T], one value a label ({list(shape)}), got "
                    f"{list(value.shape)}"
                )
            if value.dtype != torch.int64 if dtype == "int64" else not value.is_floating_point():
                raise ValueError(f"`{name}` must be {dtype}, got {value.dtype}")
        if isinstance(self.kept_tokens, Tensor):
            kept = self.kept_tokens
            if kept.ndim != 2 or kept.dtype != torch.int64:
                raise ValueError(
                    "`kept_tokens` must be KeptTokens, or int64 of shape [T, K] padded with -1,"
                    f" got {kept.dtype} {list(kept.shape)}"
                )
            object.__setattr__(self, "kept_tokens", KeptTokens.from_padded(kept))
        for name, entries in self.entries.items():
            if entries.num_slots != len(self.labels):
                raise ValueError(
                    f"`{name}` must be of {len(self.labels)} slots, one a label, got "
                    f"{entries.num_slots}"
                )
        if self.teacher_tokens is not None and self.teacher_tokens.logprobs is None:
            raise ValueError("`teacher_tokens` must have `logprobs` of its entries, got None")

    @property
    def label_bound(self) -> int | None:
        """A number above all labels; None where it is not known."""
        facts = self._known_labels
        return None if facts is None else facts.bound

    @property
    def all_labelled(self) -> bool:
        """Whether every slot is known to have a label: losses then need no masks."""
        facts = self._known_labels
        return facts is not None and facts.all_labelled

    @property
    def _known_labels(self) -> LabelFacts | None:
        facts = self.label_facts
        return facts if facts is not None and facts.hold_of(self.labels) else None

    @property
    def host_visible_until(self) -> Tensor | None:  # [T]
        """`PrefixFacts.host`; None where it is not known."""
        facts = self.prefix_facts
        return (
            facts.host if facts is not None and facts.visible_until is self.visible_until else None
        )

    @property
    def entries(self) -> dict[str, KeptTokens]:
        """The recorded entries that are not None, by the name of their field."""
        values = ((name, getattr(self, name)) for name in ENTRIES)
        return {name: value for name, value in values if value is not None}

    @property
    def rows_with_labels(self) -> RowSet:
        """Rows with a label; for batches made by hand found from `labels`, which synchronises."""
        if self.labelled_rows is not None:
            return self.labelled_rows
        rows = RowSet.from_mask((self.labels != -100).cpu(), self.document_index.cpu())
        return rows.to(self.labels.device)

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.labels.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> BatchKwargs:
        """The same batch on `device`; `non_blocking` helps from pinned memory."""
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def sent_to(self, device: torch.device | str, *, pin_memory: bool = True) -> BatchKwargs:
        """The same batch on a GPU, without waiting: one copy from page-locked memory for all.

        Tensors on a GPU stay there: counts that were summed over data ranks.
        """
        on_host: list[Tensor] = []

        def collect(value: Tensor) -> Tensor:
            on_host.extend([value] if value.is_cpu else [])
            return value

        self._map(collect)
        sent = iter(send(on_host, device, pin_memory=pin_memory))
        return self._map(lambda value: next(sent) if value.is_cpu else value)  # in this order

    def pin_memory(self) -> BatchKwargs:
        """The same batch in page-locked memory, for `to(device, non_blocking=True)`.

        Tensors on a GPU stay there: counts that were summed over data ranks.
        """
        return self._map(lambda value: value if value.is_cuda else value.pin_memory())

    def replace(self, **changes: Any) -> BatchKwargs:
        """The same batch with some fields changed, such as `old_logprobs` from another pass.

        Other `labels` drop the row sets, unless they are given too: the head then derives them,
        which waits for the device. With other `advantages` they stay; other `kept_tokens` drop
        `unrecorded_rows`.

        Raises:
            ValueError: row sets that are not those of the labels and advantages; on a GPU, where
                the values are the device's, an asynchronous assertion.
        """
        dropped = _ROW_SETS if "labels" in changes else ()
        if "kept_tokens" in changes:
            dropped = (*dropped, "unrecorded_rows")
        values: dict[str, Any] = {**dict.fromkeys(dropped), **changes}
        changed = replace(self, **values)
        if not changes.keys().isdisjoint(("labels", "advantages", *_ROW_SETS)):
            check_row_sets(changed)
        return changed

    def select(
        self,
        rows: Tensor | slice | RowSet,  # [R]
    ) -> BatchKwargs:
        """The batch of some rows: [T] vectors gathered when they are read, counts kept.

        Row sets are dropped.

        It is for a head: `visible_until`, which numbers the slots of the whole, is dropped too, and
        `whole_documents` still describes the shard, not the selection. The batch must not be
        written into before the vectors are read.
        """
        index = rows.index if isinstance(rows, RowSet) else rows
        # Those of the batch's own sets all have a label; a stream's batch has the sets of all.
        is_own = self.stream is None and any(rows is own for own in self.row_sets.values())
        facts, labels = self._known_labels, _at(self.labels, index)
        if facts is not None:
            facts = LabelFacts(labels, facts.bound, is_own or facts.all_labelled)
        # Not by `replace`: what is selected from vectors that fit does fit, and this is hot.
        selected = _Selected.__new__(_Selected)
        vars(selected).update(
            {name: value for name, value in vars(self).items() if name not in _DTYPES},
            _source=self,
            _index=index,
            labels=labels,
            label_facts=facts,
            stream_counts={name: each[index] for name, each in self.stream_counts.items()},
            **{name: entries[index] for name, entries in self.entries.items()},
            **dict.fromkeys((*_ROW_SETS, "visible_until", "prefix_facts")),
        )
        return selected

    @property
    def row_sets(self) -> dict[str, RowSet]:
        """The row sets that are not None, by the name of their field."""
        values = ((name, getattr(self, name)) for name in _ROW_SETS)
        return {name: value for name, value in values if value is not None}

    def span(self, start: int, stop: int) -> BatchKwargs:
        """The batch of the slots [start, stop), with their row sets."""
        sets: dict[str, Any] = {
            name: rows.within(start, stop) for name, rows in self.row_sets.items()
        }
        return replace(self.select(slice(start, stop)), **sets)

    def _map(self, function: Any) -> BatchKwargs:
        """The batch with `function` applied to every tensor, including row sets, in one order."""
        changes: dict[str, Any] = {
            "stream_counts": {name: each.map(function) for name, each in self.stream_counts.items()}
        }
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                changes[each.name] = function(value)
            elif isinstance(value, RowSet):
                changes[each.name] = replace(value, index=function(value.index))
            elif isinstance(value, KeptTokens):
                changes[each.name] = value.map(function)
        facts, host = self._known_labels, self.host_visible_until
        if facts is not None:
            facts = LabelFacts(changes["labels"], facts.bound, facts.all_labelled)
        prefixes = None if host is None else PrefixFacts(changes["visible_until"], host)
        return replace(self, **changes, label_facts=facts, prefix_facts=prefixes)


def _at(
    vector: Tensor,  # [T]
    index: Tensor | slice,  # [R]
) -> Tensor:  # [R]
    """Elements of a vector."""
    return vector[index] if isinstance(index, slice) else vector.gather(0, index)


ENTRIES = {"kept_tokens": ("kept_tokens",), "teacher_tokens": ("teacher_ids", "teacher_logprobs")}
"""Recorded entries of a batch, and the fields of `Document` that they are of."""

_ROW_SETS = ("labelled_rows", "active_rows", "active_document_rows", "unrecorded_rows")

_COLUMNS = {each.name: each.metadata for each in fields(BatchKwargs) if each.metadata}
_DTYPES: dict[str, str] = {name: column["dtype"] for name, column in _COLUMNS.items()}

SOURCES: dict[str, str] = {
    name: column["source"] for name, column in _COLUMNS.items() if column["source"]
}
"""The field of `Document` that gives each [T] field of a batch; the others follow from packing."""


class _Selected(BatchKwargs):
    """Some rows of a batch. A loss reads few of the vectors, and the others are not gathered."""

    _source: BatchKwargs
    _index: Tensor | slice


class _Column:
    """A vector of `_Selected`, which stays as it was first read; what is set comes before it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, batch: _Selected | None, owner: type) -> Any:
        if batch is None:
            return self
        value = getattr(batch._source, self._name)
        if isinstance(value, Tensor) and value.ndim == 1:
            value = _at(value, batch._index)
        vars(batch)[self._name] = value
        return value


for _name in _DTYPES:
    setattr(_Selected, _name, _Column(_name))
