"""What a call of the head takes of the entries that its batch has recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastrl.config.losses import DistillationLossConfig, KeepSetConfig
from fastrl.functional.batch import ENTRIES, BatchKwargs, RowSet
from fastrl.functional.head.replay import ReplayRows
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.value_checks import require_all
from fastrl.layers.losses import LanguageModelLoss


def is_recorded(loss: LanguageModelLoss[Any]) -> bool:
    """Whether a loss is a distillation from `teacher_tokens`."""
    return isinstance(loss.config, DistillationLossConfig) and loss.config.recorded


def with_recorded(
    keep: KeepSetConfig | None, losses: Mapping[str, LanguageModelLoss[Any]], batch: BatchKwargs
) -> BatchKwargs:
    """The batch with the entries that the config takes as recorded.

    A teacher has an entry at every label, a sampler at every label of a document that it has any
    of; batches from documents are not checked again for the latter. A batch without labels needs
    none: its data rank runs the head beside the others.

    Raises:
        ValueError: no record, or one without an entry of a label; of a teacher on a GPU an
            asynchronous assertion.
    """
    if keep is not None and keep.recorded:
        batch = _with_entries("kept_tokens", "`keep.recorded`", batch)
        if batch.unrecorded_rows is None:
            batch = batch.replace(unrecorded_rows=_unrecorded_rows(batch))
    names = [name for name, loss in losses.items() if is_recorded(loss)]
    if names:
        option = f"`recorded` of the losses {names}"
        batch = _with_entries("teacher_tokens", option, batch)
        has_record = (batch.labels == -100) | batch.entries["teacher_tokens"].has_entry()

        def found() -> str:
            return f", got none for slot {int((~has_record).nonzero()[0])}."

        message = f"`teacher_tokens` must be in the batch with {option} for every label"
        require_all(has_record, message, found)
    return batch


def _with_entries(name: str, option: str, batch: BatchKwargs) -> BatchKwargs:
    if name in batch.entries:
        return batch
    if len(batch.rows_with_labels):
        fields = " and ".join(f"`{field}`" for field in ENTRIES[name])
        raise ValueError(
            f"`{name}` must be in the batch with {option}, got None; give each Document {fields}."
        )
    none = batch.labels[:0]
    logprobs = none.float() if name == "teacher_tokens" else None
    empty = KeptTokens(ids=none, slots=none, num_slots=batch.num_tokens, logprobs=logprobs)
    return batch.replace(**{name: empty})


def _unrecorded_rows(batch: BatchKwargs) -> RowSet:
    """The labelled rows of documents without an entry, of a batch made by hand; synchronises."""
    document = batch.document_index.cpu()
    has_entry = batch.entries["kept_tokens"].has_entry().cpu()
    has_set = torch.zeros(int(document.max()) + 2 if len(document) else 1, dtype=torch.bool)
    has_set[document[has_entry]] = True
    lacks = (batch.labels != -100).cpu() & ~has_entry
    wrong = (lacks & has_set[document]).nonzero()[:, 0]
    if len(wrong):
        slot = int(wrong[0])
        raise ValueError(
            "`kept_tokens` must have an entry for every label of a document that has any, got none"
            f" for token {int(batch.positions[slot]) + 1} of document {int(document[slot])} (slot"
            f" {slot})."
        )
    return RowSet.from_mask(lacks, document).to(batch.labels.device)


def replay_rows(batch: BatchKwargs, rows: RowSet, gradient_rows: RowSet) -> ReplayRows:
    """The rows with a recorded set and those without, found without waiting for the device."""
    whole = batch.unrecorded_rows
    assert whole is not None
    if len(whole) == 0:
        return ReplayRows.all_recorded(rows.index, gradient_rows.index)
    is_whole = torch.zeros_like(batch.labels, dtype=torch.bool).index_fill_(0, whole.index, True)

    def split(rows: RowSet) -> tuple[Tensor, Tensor]:
        num_whole = int(torch.isin(rows.host_index, whole.host_index).sum())
        of_rows = is_whole[rows.index]
        recorded = torch.nonzero_static(~of_rows, size=len(rows) - num_whole)[:, 0]
        return rows.index[recorded], rows.index[torch.nonzero_static(of_rows, size=num_whole)[:, 0]]

    (recorded, others), (gradient, others_gradient) = split(rows), split(gradient_rows)
    return ReplayRows(recorded, gradient, others, others_gradient)
