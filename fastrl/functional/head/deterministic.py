"""Statistics of a row as a function of its hidden state, the weight, its label and transform."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.parts import tile_parts
from fastrl.functional.head.running import LABEL
from fastrl.functional.head.sharding import merge_over_vocabulary, merge_roots_over_vocabulary
from fastrl.functional.head.tile_ops import keeps_no_logits
from fastrl.functional.head.tiling import even_chunk, spans
from fastrl.kernels.arguments import MAX_PARTIAL_BYTES, PART_COLUMNS, ceil_div


def deterministic_statistics(
    call: HeadCall,
    hidden: Tensor,  # [R, D] of the rows
    rows: Tensor,  # [R]
) -> Tensor:  # [4, R] over the whole vocabulary
    """Running statistics by the tree of parts (`merge_tree`); one collective under `tp`."""
    labels, transform = call.labels[rows], call.transform.rows(rows)
    num_rows, num_columns = len(rows), call.weight.shape[0]
    label_logits = torch.full((num_rows,), -torch.inf, dtype=call.dtype, device=hidden.device)
    roots = label_logits.new_empty(call.tree.num_roots, 3, num_rows)
    row_step, column_step = _steps(call, hidden)
    for start, stop in spans(num_rows, row_step):
        chunk = slice(start, stop)
        nothing = roots.new_empty(0, 3, stop - start)
        parts = [
            tile_parts(
                label_logits[chunk],
                hidden[chunk],
                call.weight[first:last],
                labels[chunk],
                transform.rows(chunk),
                call.tile(first, last),
                entropy=call.options.entropy,
            )
            for first, last in spans(num_columns, column_step)
        ]
        leaves = parts[0] if len(parts) == 1 else torch.cat([*parts, nothing])
        roots[:, :, chunk] = _local_roots(call, leaves)
    return merge_roots_over_vocabulary(roots, label_logits, call)


def over_vocabulary(
    call: HeadCall,
    running: Tensor,  # [4, R] of this rank's columns
    parts: Tensor | None,  # [parts, 3, R] of them; where the call is deterministic
) -> Tensor:  # [4, R]
    """Running statistics of the whole vocabulary, by the tree where the call is deterministic."""
    if not call.options.deterministic:
        return merge_over_vocabulary(running, call.groups)
    assert parts is not None
    return merge_roots_over_vocabulary(_local_roots(call, parts), running[LABEL], call)


def _local_roots(
    call: HeadCall,
    parts: Tensor,  # [parts, 3, R] of this rank's columns
) -> Tensor:  # [num_roots, 3, R]
    """What a rank sends of its parts."""
    return call.tree.local_roots(parts, call.first_column, call.options.entropy)


def _steps(call: HeadCall, hidden: Tensor) -> tuple[int, int]:
    """Rows and columns at a time; columns are a multiple of those of a part."""
    num_columns = max(call.weight.shape[0], 1)
    chunk_size, max_logits_bytes = call.options.bounds
    itemsize = call.dtype.itemsize
    num_parts = ceil_div(num_columns, PART_COLUMNS)
    rows = max(MAX_PARTIAL_BYTES // (3 * itemsize * num_parts), 1)
    if keeps_no_logits(hidden, call.weight):
        return even_chunk(len(hidden), rows), num_columns
    most = max(max_logits_bytes // itemsize, 1)
    rows = min(rows, chunk_size or rows, max(most // PART_COLUMNS, 1))
    rows = even_chunk(len(hidden), rows)
    return rows, max(most // rows // PART_COLUMNS, 1) * PART_COLUMNS
