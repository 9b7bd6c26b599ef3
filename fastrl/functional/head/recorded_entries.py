"""The entries that samplers recorded for the rows of a call, in the order of their sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.kept_tokens import KeptTokens


@dataclass(frozen=True)
class RecordedEntries:
    """The entries of R rows, sorted by row and column; those of this rank's weight rows are there.

    Attributes:
        rows: [N] of 0 to R - 1; R for an entry that is not there.
        index: [N] the same, and any row for an entry that is not there.
        columns: [N] weight row of each.
        is_there: [N] of this rank's weight rows, and the first of its row with its column.
        is_label: [N] of its row.
        offsets: [R + 1] where each row's entries begin.
    """

    rows: Tensor
    index: Tensor
    columns: Tensor
    is_there: Tensor
    is_label: Tensor
    offsets: Tensor

    def of_rows(self, values: Tensor, operation: str) -> Tensor:  # [N] -> [R]
        """Sum or maximum of the values of each row."""
        initial = 0.0 if operation == "sum" else -torch.inf
        return torch.segment_reduce(
            values, operation, offsets=self.offsets, initial=initial, unsafe=True
        )


def recorded_entries(
    call: HeadCall,
    kept: KeptTokens,
    rows: Tensor,  # [R]
) -> RecordedEntries:
    """Without waiting for the device: what is not there is moved to the end, not left out."""
    num_rows, num_columns = len(rows), call.weight.shape[0]
    labels = call.labels[rows] - call.first_column
    row = torch.cat(
        [kept.places(rows, num_rows)[kept.slots], torch.arange(num_rows, device=rows.device)]
    )
    column = torch.cat([kept.ids - call.first_column, labels])
    if num_rows == 0 or num_columns == 0:
        row, column, num_columns = row[:0], column[:0], 1
    is_here = (column >= 0) & (column < call.tile().num_columns)
    key = torch.where(is_here, row * num_columns + column, num_rows * num_columns).sort()[0]
    row, column = key // num_columns, key % num_columns
    index = row.clamp(max=max(num_rows - 1, 0))
    is_there = row < num_rows
    is_there[1:] &= key[1:] != key[:-1]
    offsets = torch.searchsorted(row, torch.arange(num_rows + 1, device=rows.device))
    return RecordedEntries(row, index, column, is_there, labels[index] == column, offsets)
