"""Packed batches: padding, and each rank's slice.

The label shift is in `label_shift.py`, the slice arithmetic in `slices.py`, the counts of the
optimizer step in `counts.py`, what a model gets in `fastrl.functional.batch`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from fastrl.data.counts import BatchCounts
from fastrl.data.documents import IGNORE_LABEL, Document
from fastrl.data.label_shift import shift_documents
from fastrl.data.prefixes import check_not_split, with_shared_prefixes
from fastrl.data.prompt_groups import (
    GroupId,
    document_group_labels,
    group_numbers,
)
from fastrl.data.slices import (
    Layout,
    rows_over_ranks,
    shard_owners,
    shard_slots,
    split_multiple,
)
from fastrl.functional.batch import ENTRIES, BatchKwargs, LabelFacts, PrefixFacts, RowSet
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.streams import StreamCounts
from fastrl.parallel import ParallelGroups, group_rank, group_size

__all__ = ["BatchCounts", "BatchKwargs", "RowSet", "TokenBatch"]


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """One packed sequence of whole documents on the host, in label alignment.

    T tokens with padding, N documents. Every sequence-data rank makes the same one; `to_kwargs`
    gives each its part.
    """

    tokens: Tensor  # [T] int64, 0 at padding
    labels: Tensor  # [T] int64, -100 = none
    positions: Tensor  # [T] int64, from 0 in each document and in the padding
    document_index: Tensor  # [T] int64, -1 at padding
    columns: dict[str, Tensor]  # [T] fp32 or float64 each, 0 at slots without label
    document_lengths: tuple[int, ...]  # N
    document_label_counts: Tensor  # [N] int64
    temperatures: Tensor  # [N] float64
    model_versions: Tensor | None = None  # [N] int64, -1 = none
    rewards: Tensor | None = None  # [N] fp32 or float64, NaN = none
    group_ids: tuple[GroupId | None, ...] | None = None  # N
    kept_tokens: KeptTokens | None = None  # of T slots
    teacher_tokens: KeptTokens | None = None  # of T slots, with log-probabilities
    visible_until: Tensor | None = None  # [T] int64; None where documents share no slot
    paths: tuple[Tensor, ...] | None = None  # N of [n] int64, slots of each document; as above
    draw_weights: Tensor | None = None  # [T] float64; 0 where a label was not drawn
    target_slots: Tensor | None = None  # [T] int64, of a draft batch (`fastrl.data.drafts`)

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        *,
        pad_to_multiple: int = 1,
        sequence_length: int | None = None,
        columns: Collection[str] | None = None,
        share_prefixes: bool = False,
    ) -> TokenBatch:
        """Packs documents into one sequence, in order, and shifts labels inside each of them.

        Columns, rewards and a temperature per token are fp32, or float64 if a document is: one
        whose log-probabilities or advantages are a float64 array or tensor. That document's Python
        numbers then stay float64 too; those of documents beside it are rounded to fp32 as in any
        batch, so that no value depends on the packing.

        Args:
            documents: at most `sequence_length` tokens together.
            pad_to_multiple: the length is padded to a multiple of it.
            sequence_length: the length is padded to it, whatever the documents.
            columns: names out of "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs",
                "values", "returns", "rl_weights", "ce_weights", "distill_weights", "model_version"
                that the batch carries, no others, also where no document has a label. Default:
                those that any document has. Data ranks, whose documents may differ in what they
                have, must name them, as all ranks compute the same metrics: rewards are then
                carried too, NaN for documents without one.
            share_prefixes: tokens that documents of one `group_id` begin with, up to the one that
                predicts the first label, stand in the sequence once (docs/data.md). The model
                must see `visible_until` of the batch. Nothing else changes: losses, metrics and
                gradients are those of the flat sequence.

        Raises:
            DocumentError: (a ValueError) naming the document and the field.
        """
        if pad_to_multiple < 1:
            raise ValueError(f"`pad_to_multiple` must be at least 1, got {pad_to_multiple}")
        fields = shift_documents(documents, columns)
        batch = cls(**(with_shared_prefixes(fields) if share_prefixes else fields))
        if sequence_length is not None and batch.num_tokens > sequence_length:
            raise ValueError(
                f"`documents` must have at most {sequence_length} tokens (`sequence_length`), got "
                f"{batch.num_tokens}; see fastrl.data.packing.pack_documents"
            )
        length = batch.num_tokens if sequence_length is None else sequence_length
        return batch.padded(-(-length // pad_to_multiple) * pad_to_multiple)

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, without padding; shared ones once."""
        return int((self.document_index >= 0).sum())

    @property
    def padded_length(self) -> int:
        """T: tokens of the documents and padding."""
        return self.tokens.shape[0]

    @property
    def num_documents(self) -> int:
        """N, with labels or not."""
        return len(self.document_lengths)

    @property
    def num_labels(self) -> int:
        """Slots with a label: tokens to be learned, without the first token of documents."""
        return int(self.document_label_counts.sum())

    def stream_labels(self, stream: str) -> Tensor | None:  # [N]
        """Labels of each document in a stream; None without weights of it."""
        weights = self.columns.get(f"{stream}_weights")
        if weights is None:
            return None
        return torch.bincount(self.document_index[weights != 0], minlength=self.num_documents)

    def stream_totals(self, stream: str) -> Tensor:  # [2]
        """Labels in a stream, and documents with one."""
        labels = self.stream_labels(stream)
        if labels is None:
            return torch.zeros(2, dtype=torch.int64)
        return torch.stack([labels.sum(), labels.count_nonzero()])

    @property
    def num_documents_with_labels(self) -> int:
        """Documents with at least one label."""
        return int(self.document_label_counts.count_nonzero())

    @property
    def num_positive_labels(self) -> int:
        """Slots with a label and an advantage above 0."""
        advantages = self.columns.get("advantages")
        return 0 if advantages is None else int((advantages > 0).sum())

    @property
    def entries(self) -> dict[str, KeptTokens]:
        """The recorded entries that are not None, by the name of their field."""
        values = ((name, getattr(self, name)) for name in ENTRIES)
        return {name: value for name, value in values if value is not None}

    def padded(self, length: int) -> TokenBatch:
        """The same documents with padding up to `length` slots."""
        extra = length - self.padded_length
        if extra < 0:
            raise ValueError(f"`length` must be at least {self.padded_length}, got {length}")
        if extra == 0:
            return self

        def pad(values: Tensor, filler: int = 0) -> Tensor:
            return torch.cat([values, values.new_full((extra, *values.shape[1:]), filler)])

        start = self.padded_length - self.num_tokens
        entries: dict[str, Any] = {n: each.padded(length) for n, each in self.entries.items()}
        visible_until = self.visible_until
        if visible_until is not None:
            ends = torch.arange(self.padded_length, length) + 1
            visible_until = torch.cat([visible_until, ends])
        target_slots = self.target_slots
        if target_slots is not None:
            own = torch.arange(self.padded_length, length)
            target_slots = torch.cat([target_slots, own])
        return replace(
            self,
            tokens=pad(self.tokens),
            labels=pad(self.labels, IGNORE_LABEL),
            positions=torch.cat([self.positions, torch.arange(start, start + extra)]),
            document_index=pad(self.document_index, -1),
            columns={name: pad(column) for name, column in self.columns.items()},
            **entries,
            visible_until=visible_until,
            draw_weights=None if self.draw_weights is None else pad(self.draw_weights),
            target_slots=target_slots,
        )

    @property
    def document_slots(self) -> tuple[Tensor, ...]:
        """N of [n] int64: the slots of each document's tokens, shared ones for each."""
        if self.paths is not None:
            return self.paths
        slots = torch.arange(self.num_tokens)
        return tuple(torch.split(slots, list(self.document_lengths)))

    def split_by_document(
        self,
        values: Tensor,  # [T]
    ) -> tuple[Tensor, ...]:
        """Label-aligned values of this packed sequence, [n - 1] for each document of n tokens.

        They go back into documents with `alignment="label"`, for example log-probabilities that
        the head returned for the whole sequence.
        """
        if values.shape != self.labels.shape:
            raise ValueError(
                f"`values` must have one value a slot ({list(self.labels.shape)}), got "
                f"{list(values.shape)}"
            )
        if self.paths is not None:
            return tuple(values[path[:-1].to(values.device)] for path in self.paths)
        pieces = values[: self.num_tokens].split(self.document_lengths)
        return tuple(piece[:-1] for piece in pieces)

    def to_kwargs(
        self,
        groups: ParallelGroups | None = None,
        micro_sequences: int = 1,
        *,
        layout: Layout = "contiguous",
        join: bool = False,
        counts: BatchCounts | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[BatchKwargs, ...]:
        """This rank's part of the packed sequence, one `BatchKwargs` a micro-sequence.

        The sequence is padded until it can be split, to one slot even without documents: all
        parameters then get a gradient on every rank, as a data-parallel wrapper's collectives need.
        Counts, `document_index`, `label_counts` and `num_documents` stay those of the whole.

        Args:
            groups: `sdp` splits the sequence, `sp` only makes each part's length a multiple of its
                size, `dp` is used for `counts`.
            micro_sequences: number of pieces that the sequence is run in, in order.
            layout: of each piece over the sequence-data ranks, see `shard_slots`.
            join: give all pieces as one `BatchKwargs`, in the same order: for a head that runs
                once over the hidden states of all pieces.
            counts: of the optimizer step. Default: this batch is the whole step on this data rank,
                and the counts are summed over `groups.dp`.
            device: to put the tensors on, without waiting when it is a GPU. Default: the CPU.
        """
        if micro_sequences < 1:
            raise ValueError(f"`micro_sequences` must be at least 1, got {micro_sequences}")
        groups = groups or ParallelGroups()
        counts = counts or BatchCounts.of([self], groups, device=device)
        size = group_size(groups.sdp)
        length_multiple = lcm(
            split_multiple(size, micro_sequences, layout),
            size * micro_sequences * group_size(groups.sp),
        )
        padded = self.padded(-(-max(self.padded_length, 1) // length_multiple) * length_multiple)
        pieces = padded.shard(
            counts,
            rank=group_rank(groups.sdp),
            size=size,
            micro_sequences=micro_sequences,
            layout=layout,
            join=join,
        )
        if device is None or torch.device(device).type == "cpu":
            return pieces
        if torch.device(device).type == "cuda":
            return tuple(piece.sent_to(device) for piece in pieces)
        return tuple(piece.to(device) for piece in pieces)

    def shard(
        self,
        counts: BatchCounts,
        *,
        rank: int,
        size: int,
        micro_sequences: int = 1,
        layout: Layout = "contiguous",
        join: bool = False,
    ) -> tuple[BatchKwargs, ...]:
        """As `to_kwargs`, for any rank of a sequence-data axis, without process groups.

        The padded length must be a multiple of `split_multiple(size, micro_sequences, layout)`.

        Raises:
            ValueError: documents share slots, and the sequence is to be split.
        """
        if self.visible_until is not None:
            check_not_split(size, micro_sequences)
        slots = shard_slots(
            self.padded_length,
            rank=rank,
            size=size,
            micro_sequences=micro_sequences,
            layout=layout,
        )
        owners = shard_owners(
            self.padded_length, size=size, micro_sequences=micro_sequences, layout=layout
        )
        ranks, pieces = owners // micro_sequences, owners % micro_sequences
        if join:
            slots = slots.view(1, -1)
            owners, pieces = ranks, torch.zeros_like(owners)
        cuts = self._is_cut(owners), self._is_cut(pieces)
        batches = tuple(self._kwargs(piece, counts, *cuts) for piece in slots)
        if self.target_slots is None:
            return batches
        rows = rows_over_ranks(ranks, pieces)[self.target_slots]
        return tuple(
            batch.replace(target_rows=rows[piece])
            for batch, piece in zip(batches, slots, strict=True)
        )

    def _label_facts(
        self,
        labels: Tensor,  # [T_local]
    ) -> LabelFacts | None:
        """What is known of some slots' labels; None of a label that is none, which the head finds.

        The bound is that of the whole sequence: its ranks agree on a label that is too large.
        """
        if not bool(((self.labels >= 0) | (self.labels == IGNORE_LABEL)).all()):
            return None
        return LabelFacts(labels, int(self.labels.max()) + 1 if len(self.labels) else 0)

    def _prefix_facts(
        self,
        visible_until: Tensor | None,  # [T]
    ) -> PrefixFacts | None:
        """What is known of shared slots, which are those of the whole sequence."""
        if visible_until is None:
            return None
        longest, first = max(self.document_lengths), self.num_tokens
        stretch = torch.arange(self.padded_length - first) // longest
        host = visible_until.clone()
        host[first:] = (first + (stretch + 1) * longest).clamp(max=self.padded_length)
        return PrefixFacts(visible_until, host)

    def _is_cut(
        self,
        owners: Tensor,  # [T]
    ) -> bool:
        """Whether a document with a label has slots of different owners."""
        inside = self.document_index[1:] == self.document_index[:-1]
        has_label = self._per_token(self.document_label_counts)[1:] > 0
        return bool(((owners[1:] != owners[:-1]) & inside & has_label).any())

    def _kwargs(
        self,
        slots: Tensor,  # [T_local]
        counts: BatchCounts,
        is_cut: bool,
        is_cut_by_pieces: bool,
    ) -> BatchKwargs:
        """The batch of some slots of the sequence."""
        document_index = self.document_index[slots]
        visible_until = None if self.visible_until is None else self.visible_until[slots]
        labels, columns, draw_weights = self._drawn(slots)
        entries: dict[str, Any] = {name: each[slots] for name, each in self.entries.items()}
        versions = self.model_versions
        group_index = group_label_counts = None
        num_groups = 0
        if self.group_ids is not None and counts.group_labels is not None:
            numbers = group_numbers(self.group_ids)
            num_groups = max(numbers, default=-1) + 1
            of_groups = document_group_labels(
                self.group_ids, self.document_label_counts.tolist(), counts.group_labels
            )
            group_index = self._per_token(torch.tensor(numbers, dtype=torch.int64), -1)[slots]
            group_label_counts = self._per_token(torch.tensor(of_groups)).float()[slots]
        return BatchKwargs(
            tokens=self.tokens[slots],
            positions=self.positions[slots],
            labels=labels,
            document_index=document_index,
            label_counts=self._per_token(self.document_label_counts)[slots].float(),
            num_documents=self.num_documents,
            num_labels_in_batch=counts.num_labels_in_batch,
            num_documents_in_batch=counts.num_documents_in_batch,
            num_positive_labels_in_batch=counts.num_positive_labels_in_batch,
            **columns,
            draw_weights=draw_weights,
            **entries,
            temperature=self._temperature(slots),
            model_version=None if versions is None else self._per_token(versions, -1)[slots],
            rewards=self.rewards,
            current_version=None,
            group_index=group_index,
            group_label_counts=group_label_counts,
            num_groups=num_groups,
            num_groups_in_batch=counts.num_groups_in_batch,
            **self._row_sets(slots, labels, columns),
            whole_documents=not is_cut,
            cut_by_pieces=is_cut_by_pieces,
            max_document_length=max(self.document_lengths, default=0),
            visible_until=visible_until,
            prefix_facts=self._prefix_facts(visible_until),
            label_facts=self._label_facts(labels),
            stream_counts=self._stream_counts(slots, counts),
        )

    def _row_sets(
        self,
        slots: Tensor,  # [T_local]
        labels: Tensor,  # [T_local]
        columns: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """The row sets of some slots. Documents count as a whole, also those cut by a shard."""
        document_index, labelled = self.document_index[slots], labels != IGNORE_LABEL
        sets = {"labelled_rows": labelled}
        if "advantages" in columns:
            sets["active_rows"] = columns["advantages"] != 0
            in_active = self._in_documents_with(self.columns["advantages"] != 0)[slots]
            sets["active_document_rows"] = labelled & in_active
        if self.kept_tokens is not None:
            is_recorded = self._in_documents_with(self.kept_tokens.has_entry())[slots]
            sets["unrecorded_rows"] = labelled & ~is_recorded
        return {name: RowSet.from_mask(mask, document_index) for name, mask in sets.items()}

    def _in_documents_with(
        self,
        mask: Tensor,  # [T]
    ) -> Tensor:  # [T]
        """Which slots are of documents where `mask` holds for any."""
        has_any = torch.zeros(self.num_documents + 1, dtype=torch.bool)  # the last of the padding
        has_any[self.document_index[mask]] = True
        return has_any[self.document_index]

    def _drawn(
        self,
        slots: Tensor,  # [T_local]
    ) -> tuple[Tensor, dict[str, Any], Tensor | None]:
        """Labels, columns and weights of some slots; those not drawn are as without a label."""
        labels = self.labels[slots]
        columns = {name: column[slots] for name, column in self.columns.items()}
        if self.draw_weights is None:
            return labels, columns, None
        weights = self.draw_weights[slots]
        labels = labels.masked_fill(weights == 0, IGNORE_LABEL)
        columns = {name: column.masked_fill(weights == 0, 0) for name, column in columns.items()}
        return labels, columns, weights if self._is_float64 else weights.float()

    def _stream_counts(
        self,
        slots: Tensor,  # [T_local]
        counts: BatchCounts,
    ) -> dict[str, StreamCounts]:
        """Those of the streams with weights, for some slots of the sequence."""
        result = {}
        for stream, (labels, documents) in counts.streams.items():
            by_document = self.stream_labels(stream)
            if by_document is not None:
                result[stream] = StreamCounts(
                    label_counts=self._per_token(by_document)[slots].float(),
                    num_labels_in_batch=labels,
                    num_documents_in_batch=documents,
                )
        return result

    @property
    def _is_float64(self) -> bool:
        """Whether a document's log-probabilities or advantages are float64."""
        return any(column.dtype == torch.float64 for column in self.columns.values())

    def _temperature(
        self,
        slots: Tensor,  # [T_local]
    ) -> float | Tensor:
        if self.num_documents == 0:
            return 1.0
        if bool((self.temperatures == self.temperatures[0]).all()):
            return float(self.temperatures[0])
        temperatures = self._per_token(self.temperatures, 1)[slots]
        return temperatures if self._is_float64 else temperatures.float()

    def _per_token(
        self,
        values: Tensor,  # [N]
        padding: int = 0,
    ) -> Tensor:
        """[T] values of each slot's document; index -1 of the padding finds the appended one."""
        return torch.cat([values, values.new_full((1,), padding)])[self.document_index]
