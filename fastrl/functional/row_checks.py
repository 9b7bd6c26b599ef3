"""Whether the row sets of a batch are those of its labels and advantages.

A batch from documents has such sets, and they are not compared again in the head's calls. One whose
fields are replaced by hand may not, and its loss would then be that of other tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastrl.functional.value_checks import require_all

if TYPE_CHECKING:
    from fastrl.functional.batch import BatchKwargs, RowSet

_REMEDY = "; set the row sets to None, and they are derived from `labels`"


def check_row_sets(batch: BatchKwargs) -> None:
    """Refuses row sets that do not belong to the batch, without waiting for a device.

    Rows must increase, as their documents' ends do. `labelled_rows` must be all slots with a
    label; `active_rows` and `active_document_rows` some of them, all with an advantage other than 0
    included; `unrecorded_rows` the labelled ones without `kept_tokens`.

    Raises:
        ValueError: by the name of the set; on a GPU, where the values are the device's, an
            asynchronous assertion.
    """
    for name, rows in batch.row_sets.items():
        _check_order(name, rows, batch.num_tokens)
    is_label = batch.labels != -100
    is_active = torch.zeros_like(is_label)
    if batch.advantages is not None:
        is_active = is_label & (batch.advantages != 0)
    for name, rows in batch.row_sets.items():
        index = rows.index.to(is_label.device)
        inside = torch.zeros_like(is_label).index_fill_(0, index, True)
        _require(name, inside <= is_label, "rows with a label alone")
        if name == "labelled_rows":
            _require(name, inside >= is_label, "all rows with a label")
        elif name == "unrecorded_rows":
            kept = batch.entries.get("kept_tokens")
            has_entry = torch.zeros_like(is_label) if kept is None else kept.has_entry()
            _require(name, inside == is_label & ~has_entry, "the rows without `kept_tokens` alone")
        elif batch.advantages is not None:
            _require(name, inside >= is_active, "all labelled rows with an advantage other than 0")


def _check_order(name: str, rows: RowSet, num_tokens: int) -> None:
    """What is known on the host."""
    index, ends = rows.host_index, [0, *rows.document_ends]
    if len(index) and not (int(index[0]) >= 0 and int(index[-1]) < num_tokens):
        raise ValueError(f"`{name}` must be rows from 0 to {num_tokens - 1}, got {index.tolist()}")
    if not bool((index[1:] > index[:-1]).all()):
        raise ValueError(f"`{name}` must be rows in increasing order, got {index.tolist()}")
    if ends[-1] != len(index) or any(b <= a for a, b in pairwise(ends)):
        raise ValueError(
            f"`{name}` must have `document_ends` that increase to its {len(index)} rows, got "
            f"{rows.document_ends}"
        )


def _require(
    name: str,
    holds: Tensor,  # [T]
    what: str,
) -> None:
    def found() -> str:
        return f", which row {int((~holds).nonzero()[0])} contradicts"

    require_all(holds, f"`{name}` must be {what}", found, _REMEDY)
