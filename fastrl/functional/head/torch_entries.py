"""Recorded entries in torch, for any device and dtype.

`fastrl.kernels` has Triton kernels of the same names, signatures and arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head import torch_rows
from fastrl.functional.head.matmul import accumulation_dtype
from fastrl.functional.head.running import finish_statistics, finite_or_zero
from fastrl.functional.head.tiling import spans
from fastrl.kernels.arguments import LogitTransform, RowGradients, VocabularyTile

# Elements of the gathered rows that exist at a time: 16 MiB in fp32.
GATHERED_ELEMENTS = 2**22
# The tile of an entry, whose bias is in its product.
_SINGLE_COLUMN = VocabularyTile(first_column=0, num_columns=1, bias=None)


def entry_keys(
    ids: Tensor,  # [n]
    slots: Tensor,  # [n]
    labels: Tensor,  # [T]
    is_row: Tensor,  # [T] bool
    first_column: int,
    num_columns: int,
) -> Tensor:  # [n + T]
    """slot * num_columns + column of each entry, then of each slot's label.

    Those of other slots than `is_row`, or of other columns than the `num_columns` from
    `first_column` on, are T * max(num_columns, 1): after all others.
    """
    num_slots, width = len(labels), max(num_columns, 1)
    slot = torch.cat([slots, torch.arange(num_slots, device=slots.device)])
    column = torch.cat([ids, labels]) - first_column
    is_there = (slot >= 0) & is_row[slot] & (column >= 0) & (column < num_columns)
    return torch.where(is_there, slot * width + column, num_slots * width)


def split_keys(
    keys: Tensor,  # [N] in rising order
    num_slots: int,
    num_columns: int,
    absent: int,
) -> tuple[Tensor, Tensor]:  # [N], [N]
    """Slot and column of each key; (T, `absent`) for those that are not there or come again."""
    slots = keys // num_columns
    is_there = slots < num_slots
    is_there[1:] &= keys[1:] != keys[:-1]
    columns = torch.where(is_there, keys % num_columns, absent)
    return torch.where(is_there, slots, num_slots), columns


def gathered_products(
    hidden: Tensor,  # [T, D]
    weight: Tensor,  # [V, D]
    slots: Tensor,  # [N]; T for an entry that is not there
    columns: Tensor,  # [N]
) -> Tensor:  # [N] in accumulation_dtype
    """sum_d hidden[slots, d] weight[columns, d]; 0 for entries that are not there."""
    dtype = accumulation_dtype(hidden.dtype)
    result = torch.zeros(len(slots), dtype=dtype, device=hidden.device)
    there = (slots < len(hidden)).nonzero()[:, 0]
    for start, stop in spans(len(there), max(GATHERED_ELEMENTS // max(hidden.shape[1], 1), 1)):
        chunk = there[start:stop]
        left = hidden[slots[chunk]].to(dtype)
        result[chunk] = (left * weight[columns[chunk]].to(dtype)).sum(1)
    return result


def entry_statistics(
    products: Tensor,  # [N]
    columns: Tensor,  # [N]; not below the tile's for an entry that is not there
    offsets: Tensor,  # [T + 1]
    labels: Tensor,  # [T] of the whole vocabulary
    transform: LogitTransform,
    tile: VocabularyTile,
) -> Tensor:  # [4, T]
    """Running statistics of each slot's entries, in their order; of no columns without entries."""
    num_slots, num_entries = len(labels), int(offsets[-1])
    slots = torch.arange(num_slots, device=labels.device).repeat_interleave(offsets.diff())
    products, columns = products[:num_entries], columns[:num_entries]
    z = _logits(products, slots, columns, transform, tile)

    def of_slots(values: Tensor, operation: str) -> Tensor:
        initial = 0.0 if operation == "sum" else -torch.inf
        return torch.segment_reduce(
            values, operation, offsets=offsets, initial=initial, unsafe=True
        )

    maximum = of_slots(z, "max")
    shifted = z - finite_or_zero(maximum)[slots]
    exp = shifted.exp()
    is_label = labels[slots] - tile.first_column == columns
    return torch.stack(
        [
            maximum,
            of_slots(exp, "sum"),
            of_slots(torch.where(exp > 0, shifted * exp, 0), "sum"),
            of_slots(torch.where(is_label, z, -torch.inf), "max"),
        ]
    )


def finish_rows(
    statistics: Tensor,  # [4, T]
    is_row: Tensor,  # [T] bool
) -> tuple[Tensor, Tensor, Tensor]:  # [T] each
    """Log-probability, entropy and log-sum-exp as of `finish_statistics`; 0 outside of `is_row`."""
    finished = finish_statistics(statistics, entropy=True).vectors()
    logprobs, entropy, logsumexp = (torch.where(is_row, value, 0) for value in finished)
    return logprobs, entropy, logsumexp


def entry_gradient(
    products: Tensor,  # [N]
    slots: Tensor,  # [N]
    columns: Tensor,  # [N]; not below the tile's for an entry that is not there
    labels: Tensor,  # [T]
    logsumexp: Tensor,  # [T]
    entropy: Tensor | None,  # [T], needed with a gradient of it
    gradients: RowGradients,  # of [T]
    transform: LogitTransform,
    tile: VocabularyTile,
) -> Tensor:  # [N]
    """Gradient of the products as of `row_gradient`; 0 for entries that are not there."""
    is_there = columns < tile.num_columns
    if tile.num_columns == 0 or len(products) == 0:
        return torch.zeros_like(products)
    slots, columns = torch.where(is_there, slots, 0), torch.where(is_there, columns, 0)
    grad = torch_rows.row_gradient(
        _biased(products, columns, tile)[:, None],
        torch.where(labels[slots] - tile.first_column == columns, 0, -1),
        logsumexp[slots],
        None if entropy is None else entropy[slots],
        gradients.rows(slots),
        transform.rows(slots),
        _SINGLE_COLUMN,
        operand_dtype=products.dtype,
    )[:, 0]
    return torch.where(is_there, grad, 0)


def _biased(products: Tensor, columns: Tensor, tile: VocabularyTile) -> Tensor:
    return products if tile.bias is None else products + tile.bias[columns]


def _logits(
    products: Tensor,  # [N]
    slots: Tensor,  # [N]
    columns: Tensor,  # [N]
    transform: LogitTransform,
    tile: VocabularyTile,
) -> Tensor:  # [N]
    """z, -inf for entries that are not there."""
    is_there = columns < tile.num_columns
    if len(products) == 0:
        return products
    biased = _biased(products, torch.where(is_there, columns, 0), tile)
    z, _ = torch_rows.transformed(biased[:, None], transform.rows(slots), _SINGLE_COLUMN)
    return torch.where(is_there, z[:, 0], -torch.inf)
