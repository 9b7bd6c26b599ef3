"""Products of hidden states and weight that never leave the chip as logits.

Each function is a GEMM with an epilogue (`linear_kernel`) in the place of a product and a row
kernel: `linear_statistics` of `update_row_statistics`, `linear_gradient` of `row_gradient`.
`linear_exponentials` is the first half of a gradient; the second is in `exponentials`.

All of them need 16-bit operands with rows that TMA can read (`kernels.can_run_fused`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastrl.kernels.arguments import (
    MAX_PARTIAL_BYTES,
    PART_COLUMNS,
    LogitTransform,
    RowGradients,
    VocabularyTile,
    ceil_div,
)
from fastrl.kernels.launch import launch
from fastrl.kernels.linear_kernel import (
    EXPONENTIALS,
    GRADIENT,
    PARTS,
    STATISTICS,
    linear_kernel,
)
from fastrl.kernels.merge import merge_partial_statistics


@dataclass(frozen=True)
class Blocks:
    """Tile of the product and depth of a step."""

    rows: int = 128
    columns: int = PART_COLUMNS
    depth: int = 64
    num_stages: int = 4
    num_warps: int = 8


BLOCKS = Blocks()
# Row tiles whose hidden states fit this go through the columns together and stay in L2.
GROUP_BYTES = 40 * 2**20


def linear_statistics(
    statistics: Tensor,  # [4, R] fp32
    hidden_states: Tensor,  # [R, D]
    weight: Tensor,  # [S, D]
    labels: Tensor,  # [R]
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> None:
    """`update_row_statistics` of h W^T, without the product in memory.

    Args:
        statistics: merged into, in place.
        hidden_states: bf16 or fp16, of 8 n columns.
        weight: a slab of rows of the whole weight, same dtype.
        labels: int64, of the whole vocabulary.
        transform: how products become z.
        tile: where the slab lies in the vocabulary, with its bias.
        entropy: whether u is computed.
    """
    num_rows = hidden_states.shape[0]
    if num_rows == 0 or tile.num_columns == 0:
        return
    tiles = ceil_div(weight.shape[0], BLOCKS.columns)
    most_rows = max(MAX_PARTIAL_BYTES // (12 * tiles) // BLOCKS.rows, 1) * BLOCKS.rows
    step = ceil_div(num_rows, ceil_div(num_rows, most_rows))
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        part = statistics[:, rows]
        partials = _new_partials(tiles, part)
        prepared = _Launch(
            STATISTICS.value,
            hidden_states[rows],
            labels[rows],
            transform.rows(rows),
            HAS_ENTROPY=entropy,
            label_logits=part[3],
            partials=partials,
        )
        prepared(weight, None, tile)
        merge_partial_statistics(part, partials, entropy=entropy)


def linear_parts(
    label_logits: Tensor,  # [R] fp32
    hidden_states: Tensor,  # [R, D]
    weight: Tensor,  # [S, D]
    labels: Tensor,  # [R]
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> Tensor:  # [tiles, 3, R] fp32
    """References, s and u of each tile of columns: to the bit those of `linear_exponentials`.

    Those of a row are a function of its hidden state, the tile's weight and the row's transform.
    `label_logits` is written where the label is in the slab; the other arguments are those of
    `linear_statistics`.
    """
    assert BLOCKS.columns == PART_COLUMNS
    partials = _new_partials(ceil_div(weight.shape[0], BLOCKS.columns), label_logits)
    prepared = _Launch(
        PARTS.value,
        hidden_states,
        labels,
        transform,
        HAS_ENTROPY=entropy,
        label_logits=label_logits,
        partials=partials,
    )
    prepared(weight, None, tile)
    return partials


def linear_exponentials(
    statistics: Tensor,  # [4, R] fp32
    output: Tensor,  # [R, S] bf16
    hidden_states: Tensor,  # [R, D] bf16
    weight: Tensor,  # [S, D]
    labels: Tensor,  # [R]
    transform: LogitTransform,
    tile: VocabularyTile,
    *,
    entropy: bool,
) -> Tensor:  # [tiles, 3, R] fp32
    """Statistics of rows, and the exponentials of their logits relative to a reference.

        output = e^(z - reference),  times the slope of the cap if there is one

    The reference of a row and column tile is a power of two (of e^z), the same for all tiles of
    nearly every row, so that the exponentials keep their relative precision in bf16 whatever the
    logits are. The gradient of the loss is output times a number a row: see `exponentials`.

    `output` is 0 in the columns of padding, its rows are 16-byte aligned. The first three of
    `statistics` are overwritten; otherwise the arguments are those of `linear_statistics`. The
    result holds the tiles' references (in nats), s and u.
    """
    assert output.dtype == torch.bfloat16, "other 16-bit floats have too few exponents"
    partials = _new_partials(ceil_div(weight.shape[0], BLOCKS.columns), statistics)
    if hidden_states.shape[0] == 0:
        return partials
    prepared = _Launch(
        EXPONENTIALS.value,
        hidden_states,
        labels,
        transform,
        HAS_ENTROPY=entropy,
        label_logits=statistics[3],
        partials=partials,
    )
    prepared(weight, output, tile)
    merge_partial_statistics(statistics, partials, entropy=entropy, accumulate=False)
    return partials


def linear_gradient(
    output: Tensor,  # [R, S] bf16 or fp16
    hidden_states: Tensor,  # [R, D]
    weight: Tensor,  # [S, D]
    labels: Tensor,  # [R]
    logsumexp: Tensor,  # [R]
    entropy: Tensor | None,  # [R]
    gradients: RowGradients,
    transform: LogitTransform,
    tile: VocabularyTile,
) -> None:
    """`row_gradient` of h W^T, rounded once, without the product in memory.

    `output` is as in `linear_exponentials`, the operands as in `linear_statistics`; the other
    arguments are those of `row_gradient`.
    """
    if hidden_states.shape[0] == 0:
        return
    gradient = LinearGradient(hidden_states, labels, logsumexp, entropy, gradients, transform)
    gradient(output, weight, tile)


class LinearGradient:
    """`linear_gradient` of the same rows by one tile of the weight after the other.

    Args: those of `linear_gradient`.
    """

    def __init__(
        self,
        hidden_states: Tensor,  # [R, D]
        labels: Tensor,  # [R]
        logsumexp: Tensor,  # [R]
        entropy: Tensor | None,  # [R]
        gradients: RowGradients,
        transform: LogitTransform,
    ) -> None:
        assert gradients.entropy is None or entropy is not None
        gradients = gradients.contiguous()
        self._launch = _Launch(
            GRADIENT.value,
            hidden_states,
            labels,
            transform,
            HAS_ENTROPY=gradients.entropy is not None,
            logsumexp=logsumexp.contiguous(),
            entropy=None if gradients.entropy is None or entropy is None else entropy.contiguous(),
            grad_logprobs=gradients.logprobs,
            grad_logsumexp=gradients.logsumexp,
            grad_entropy=gradients.entropy,
        )

    def __call__(self, output: Tensor, weight: Tensor, tile: VocabularyTile) -> None:
        self._launch(weight, output, tile)


def _new_partials(
    tiles: int,
    of_rows: Tensor,  # [..., R]
) -> Tensor:  # [tiles, 3, R]
    return of_rows.new_empty(tiles, 3, of_rows.shape[-1])


class _Launch:
    """Launches over the same rows; what an epilogue does not use is None.

    Args:
        epilogue: of the kernel.
        hidden_states: [R, D].
        labels: [R].
        transform: of the rows.
        others: arguments of the epilogue, by name.
    """

    def __init__(
        self,
        epilogue: int,
        hidden_states: Tensor,
        labels: Tensor,
        transform: LogitTransform,
        **others: Any,
    ) -> None:
        hidden_states, blocks = _aligned(hidden_states), BLOCKS
        num_rows, depth = hidden_states.shape
        self._row_tiles = ceil_div(num_rows, blocks.rows)
        self._most_programs = num_multiprocessors(hidden_states.device)
        most = max(GROUP_BYTES // (blocks.rows * depth * hidden_states.element_size()), 1)
        shared = {
            "hidden": TensorDescriptor.from_tensor(hidden_states, [blocks.rows, blocks.depth]),
            "labels": labels.contiguous(),
            "num_rows": num_rows,
            "depth": depth,
            "group": ceil_div(self._row_tiles, ceil_div(self._row_tiles, most)),
            "EPILOGUE": epilogue,
            "HAS_GRAD_LOGSUMEXP": others.get("grad_logsumexp") is not None,
            "IS_INCREASING": transform.softcap is not None or transform.logit_scale > 0,
            "BLOCK_R": blocks.rows,
            "BLOCK_V": blocks.columns,
            "BLOCK_D": blocks.depth,
            **transform.contiguous().launch_arguments(),
            **others,
        }
        # In the order of the kernel's parameters, as a compiled kernel takes them.
        self._arguments = {name: shared.get(name) for name in linear_kernel.arg_names}
        self._compiled: dict[object, Any] = {}

    def __call__(self, weight: Tensor, output: Tensor | None, tile: VocabularyTile) -> None:
        """One launch, over the rows of the weight of a tile."""
        blocks, num_columns = BLOCKS, weight.shape[0]
        arguments = self._arguments | {
            "weight": TensorDescriptor.from_tensor(
                _aligned(weight), [blocks.columns, blocks.depth]
            ),
            "output": None
            if output is None
            else TensorDescriptor.from_tensor(output, [blocks.rows, blocks.columns // 2]),
            "total_columns": num_columns,
            **tile.launch_arguments(),
        }
        tiles = self._row_tiles * ceil_div(num_columns, blocks.columns)
        grid = (min(tiles, self._most_programs), 1, 1)
        # Another look at 30 arguments would choose the same kernel: beside numbers that Triton is
        # told not to look at, tiles differ by their bias.
        bias = tile.bias
        key = None if bias is None else (bias.dtype, bias.data_ptr() % 16)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments.values())
            return
        self._compiled[key] = launch(
            linear_kernel,
            grid,
            **arguments,
            num_stages=blocks.num_stages,
            num_warps=blocks.num_warps,
        )


def _aligned(matrix: Tensor) -> Tensor:
    """The matrix, or a copy if TMA cannot read it, as a view that begins off a 16-byte boundary."""
    fits = matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0
    return matrix if fits else matrix.contiguous().clone()


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Programs that run concurrently when each fills a multiprocessor."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
