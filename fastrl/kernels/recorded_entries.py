"""Recorded entries of the vocabulary as numbers that sort by slot and column, and back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.arguments import ceil_div
from fastrl.kernels.launch import launch


def entry_keys(
    ids: Tensor,  # [n]
    slots: Tensor,  # [n]
    labels: Tensor,  # [T]
    is_row: Tensor,  # [T] bool
    first_column: int,
    num_columns: int,
) -> Tensor:  # [n + T] int64
    """slot * num_columns + column of each entry, then of each slot's label.

    Those of other slots than `is_row`, or of other columns than the `num_columns` from
    `first_column` on, are T * max(num_columns, 1): after all others.
    """
    num_ids, num_slots = len(ids), len(labels)
    keys = torch.empty(num_ids + num_slots, dtype=torch.int64, device=labels.device)
    block = 256
    launch(
        _keys_kernel,
        (ceil_div(max(len(keys), 1), block),),
        keys=keys,
        ids=ids.contiguous(),
        slots=slots.contiguous(),
        labels=labels.contiguous(),
        is_row=is_row,
        num_ids=num_ids,
        num_slots=num_slots,
        first_column=first_column,
        num_columns=num_columns,
        BLOCK=block,
        num_warps=4,
    )
    return keys


@triton.jit(do_not_specialize=["num_ids", "num_slots", "first_column", "num_columns"])
def _keys_kernel(
    keys,  # [n + T]
    ids,  # [n]
    slots,  # [n]
    labels,  # [T]
    is_row,  # [T]
    num_ids,
    num_slots,
    first_column,
    num_columns,
    BLOCK: tl.constexpr,
):
    """One program makes a block of keys."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = entries < num_ids
    is_label = (entries >= num_ids) & (entries < num_ids + num_slots)
    slot = tl.load(slots + entries, mask=is_id, other=-1)
    slot = tl.where(is_label, entries - num_ids, slot)
    column = tl.load(ids + entries, mask=is_id, other=0)
    column = tl.where(is_label, tl.load(labels + slot, mask=is_label, other=0), column)
    column -= first_column
    is_there = slot >= 0
    is_there = is_there & (tl.load(is_row + slot, mask=is_there, other=0) != 0)
    is_there = is_there & (column >= 0) & (column < num_columns)
    width = tl.maximum(tl.cast(num_columns, tl.int64), 1)
    key = tl.where(is_there, slot * width + column, num_slots * width)
    tl.store(keys + entries, key, mask=is_id | is_label)


def split_keys(
    keys: Tensor,  # [N] int64 in rising order
    num_slots: int,
    num_columns: int,
    absent: int,
) -> tuple[Tensor, Tensor]:  # [N], [N] int32
    """Slot and column of each key; (T, `absent`) for those that are not there or come again."""
    slots = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    columns = torch.empty_like(slots)
    block = 256
    launch(
        _split_kernel,
        (ceil_div(max(len(keys), 1), block),),
        slots=slots,
        columns=columns,
        keys=keys,
        num_keys=len(keys),
        num_slots=num_slots,
        num_columns=num_columns,
        absent=absent,
        BLOCK=block,
        num_warps=4,
    )
    return slots, columns


@triton.jit(do_not_specialize=["num_keys", "num_slots", "num_columns", "absent"])
def _split_kernel(
    slots,  # [N]
    columns,  # [N]
    keys,  # [N]
    num_keys,
    num_slots,
    num_columns,
    absent,
    BLOCK: tl.constexpr,
):
    """One program splits a block of keys."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entries < num_keys
    key = tl.load(keys + entries, mask=mask, other=0)
    before = tl.load(keys + entries - 1, mask=mask & (entries > 0), other=-1)
    slot = key // num_columns
    is_there = (slot < num_slots) & (key != before)
    column = key - slot * num_columns
    tl.store(slots + entries, tl.where(is_there, slot, num_slots).to(tl.int32), mask=mask)
    tl.store(columns + entries, tl.where(is_there, column, absent).to(tl.int32), mask=mask)
