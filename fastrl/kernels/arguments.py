"""Arguments that all kernels of logits share: transform, tile, upstream gradients.

This module needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

# Columns of a part of the vocabulary: a leaf of the merge tree, a tile of a fused product.
PART_COLUMNS = 256
# Bounds the statistics of parts that exist at a time, of a chunk of rows.
MAX_PARTIAL_BYTES = 48 * 2**20
# Parts that are merged at a time, a power of two.
MOST_PARTS = 512


def ceil_div(number: int, divisor: int) -> int:
    """The quotient rounded up, of host numbers: Triton's own wraps constants, 20 times as slow."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two from a positive host number on, as fast."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class LogitTransform:
    """z = cap(logit_scale (x + bias)) / temperature of raw products x = h W^T, in this order."""

    temperature: float | Tensor = 1.0  # [R] when each row has its own; positive
    softcap: float | None = None  # bound of tanh, None for none
    logit_scale: float = 1.0

    def rows(self, index: Tensor | slice | None) -> LogitTransform:
        """The transform of some of the rows."""
        if index is None or not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature[index])

    def contiguous(self) -> LogitTransform:
        """The same transform with a contiguous temperature."""
        if not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature.contiguous())

    def launch_arguments(self) -> dict[str, Any]:
        """Arguments of a jitted kernel, by name."""
        has_rows = isinstance(self.temperature, Tensor)
        return {
            "temperature": self.temperature if has_rows else float(self.temperature),
            "softcap": 0.0 if self.softcap is None else float(self.softcap),
            "logit_scale": float(self.logit_scale),
            "ROW_TEMPERATURE": has_rows,
            "HAS_SOFTCAP": self.softcap is not None,
        }


@dataclass(frozen=True)
class VocabularyTile:
    """Where a tile of logits lies in the vocabulary."""

    first_column: int  # vocabulary index of the tile's first column
    num_columns: int  # its columns that belong to the vocabulary; the rest is padding
    bias: Tensor | None  # [S] of its columns, any float dtype

    def launch_arguments(self) -> dict[str, Any]:
        """Arguments of a jitted kernel, by name."""
        return {
            "first_column": self.first_column,
            "num_columns": self.num_columns,
            "bias": self.bias,
            "HAS_BIAS": self.bias is not None,
        }


@dataclass(frozen=True)
class RowGradients:
    """Upstream gradients of the row statistics; None is zero."""

    logprobs: Tensor  # [R]
    entropy: Tensor | None  # [R]
    logsumexp: Tensor | None  # [R]

    def rows(self, index: Tensor | slice) -> RowGradients:
        """The gradients of some of the rows."""
        return RowGradients(
            self.logprobs[index],
            None if self.entropy is None else self.entropy[index],
            None if self.logsumexp is None else self.logsumexp[index],
        )

    def contiguous(self) -> RowGradients:
        """The same gradients, each contiguous."""
        return RowGradients(
            self.logprobs.contiguous(),
            None if self.entropy is None else self.entropy.contiguous(),
            None if self.logsumexp is None else self.logsumexp.contiguous(),
        )

    def launch_arguments(self) -> dict[str, Any]:
        """Arguments of a jitted kernel that reads strided gradients, by name."""
        tensors = {
            "grad_logprobs": self.logprobs,
            "grad_logsumexp": self.logsumexp,
            "grad_entropy": self.entropy,
        }
        strides = {
            f"{name}_stride": 0 if tensor is None else tensor.stride(0)
            for name, tensor in tensors.items()
        }
        return {
            **tensors,
            **strides,
            "HAS_GRAD_LOGSUMEXP": self.logsumexp is not None,
            "HAS_GRAD_ENTROPY": self.entropy is not None,
        }
