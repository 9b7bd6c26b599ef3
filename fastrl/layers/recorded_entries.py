"""What a call of the head takes of the entries that its batch has recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastrl.config.losses import DistillationLossConfig, KeepSetConfig
from fastrl.functional.batch import ENTRIES, BatchKwargs
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.value_checks import require_all
from fastrl.layers.losses import LanguageModelLoss


def is_recorded(loss: LanguageModelLoss[Any]) -> bool:
    """Whether a loss is a distillation from `teacher_tokens`."""
    return isinstance(loss.config, DistillationLossConfig) and loss.config.recorded


def with_recorded(
    keep: KeepSetConfig | None, losses: Mapping[str, LanguageModelLoss[Any]], batch: BatchKwargs
) -> BatchKwargs:
    """The batch with an entry at every label of what the config takes as recorded.

    A batch without labels needs none: its data rank runs the head beside the others.

    Raises:
        ValueError: no record, or one without an entry of a label; on a GPU an asynchronous
            assertion.
    """
    if keep is not None and keep.recorded:
        batch = _with_entries("kept_tokens", "`keep.recorded`", batch)
    names = [name for name, loss in losses.items() if is_recorded(loss)]
    if names:
        batch = _with_entries("teacher_tokens", f"`recorded` of the losses {names}", batch)
    return batch


def _with_entries(name: str, option: str, batch: BatchKwargs) -> BatchKwargs:
    message = f"`{name}` must be in the batch with {option}"
    entries = batch.entries.get(name)
    if entries is None:
        if len(batch.rows_with_labels):
            fields = " and ".join(f"`{field}`" for field in ENTRIES[name])
            raise ValueError(f"{message}, got None; give each Document {fields}.")
        none = batch.labels[:0]
        logprobs = none.float() if name == "teacher_tokens" else None
        empty = KeptTokens(ids=none, slots=none, num_slots=batch.num_tokens, logprobs=logprobs)
        return batch.replace(**{name: empty})
    has_record = (batch.labels == -100) | entries.has_entry()

    def found() -> str:
        return f", got none for slot {int((~has_record).nonzero()[0])}."

    require_all(has_record, f"{message} for every label", found)
    return batch
