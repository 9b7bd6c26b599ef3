"""Operations on recorded entries, in Triton where it runs, else in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fastrl.functional.head import torch_entries, torch_segments
from fastrl.kernels import can_run


@dataclass(frozen=True)
class EntryOps:
    """The functions of `torch_entries` and `torch_segments`, or the kernels of their names."""

    entry_keys: Callable[..., Tensor]
    split_keys: Callable[..., tuple[Tensor, Tensor]]
    gathered_products: Callable[..., Tensor]
    entry_statistics: Callable[..., Tensor]
    finish_rows: Callable[..., tuple[Tensor, Tensor, Tensor]]
    entry_gradient: Callable[..., Tensor]
    add_segments: Callable[..., None]
    write_rows: Callable[..., None]


def entry_ops(operand: Tensor) -> EntryOps:
    """Those for products of operands like this one."""
    if not can_run(operand):
        return EntryOps(
            torch_entries.entry_keys,
            torch_entries.split_keys,
            torch_entries.gathered_products,
            torch_entries.entry_statistics,
            torch_entries.finish_rows,
            torch_entries.entry_gradient,
            torch_segments.add_segments,
            torch_segments.write_rows,
        )
    from fastrl.kernels import entry_rows, gathered_products, recorded_entries, segment_sums

    return EntryOps(
        recorded_entries.entry_keys,
        recorded_entries.split_keys,
        gathered_products.gathered_products,
        entry_rows.entry_statistics,
        entry_rows.finish_rows,
        entry_rows.entry_gradient,
        segment_sums.add_segments,
        segment_sums.write_rows,
    )
