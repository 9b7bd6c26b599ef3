"""The entries that samplers recorded for the rows of a call, in the order of their sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.entry_ops import entry_ops
from fastrl.functional.kept_tokens import KeptTokens


@dataclass(frozen=True)
class RecordedEntries:
    """The entries of T slots, sorted by slot and column.

    Attributes:
        slots: [N] of each entry; T for one that is not there, not of this rank's weight rows, of a
            slot that is no row of the call, or for the second time.
        columns: [N] weight row of each; the number of weight rows for one that is not there.
        offsets: [T + 1] where each slot's entries begin.
    """

    slots: Tensor
    columns: Tensor
    offsets: Tensor


def recorded_entries(
    call: HeadCall,
    num_columns: int,
    kept: KeptTokens,
    is_row: Tensor,  # [T] bool
) -> RecordedEntries:
    """The recorded entries and the labels, each once, without waiting for the device.

    Args:
        call: whose labels and weight rows.
        num_columns: of this rank's weight rows, those that belong to the vocabulary.
        kept: of the T tokens.
        is_row: which of them have entries.
    """
    ops = entry_ops(call.hidden_states)
    num_slots, width = call.num_tokens, max(num_columns, 1)
    keys = ops.entry_keys(
        kept.ids, kept.slots, call.labels, is_row, call.first_column, num_columns
    ).sort()[0]
    starts = torch.arange(0, num_slots * width + 1, width, device=keys.device)
    slots, columns = ops.split_keys(keys, num_slots, width, call.weight.shape[0])
    return RecordedEntries(slots, columns, torch.searchsorted(keys, starts))
