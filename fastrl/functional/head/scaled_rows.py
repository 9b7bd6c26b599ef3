"""A matrix with an unapplied factor for each row, and the small passes that apply factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fastrl.functional.head.matmul import accumulation_dtype, add_matmul_, matmul, matmul_rounded
from fastrl.kernels import can_run


@dataclass(frozen=True)
class ScaledRows:
    """factors[:, None] * matrix, not materialised; None is 1."""

    matrix: Tensor  # [R, S]
    factors: Tensor | None  # [R] fp32

    def times(self, weight: Tensor) -> Tensor:
        """matrix W [R, D], in `accumulation_dtype`; the caller applies the factors."""
        return matmul(self.matrix, weight)

    def transposed_times(self, hidden: Tensor, out: Tensor) -> None:
        """out [S, D] = (factors matrix)^T h, summed in `accumulation_dtype`, rounded to out's."""
        matmul_rounded(self.matrix.t(), self._scaled(hidden), out=out)

    def add_transposed_times(self, hidden: Tensor, total: Tensor) -> None:
        """total [S, D] += (factors matrix)^T h."""
        add_matmul_(total, self.matrix.t(), self._scaled(hidden))

    def column_sums(self) -> Tensor:
        """Sums over rows [S], in `accumulation_dtype`."""
        if can_run(self.matrix):
            from fastrl.kernels.row_scaling import column_sums

            return column_sums(self.matrix, self.factors)
        return self.matrix.sum(0, dtype=accumulation_dtype(self.matrix.dtype))

    def _scaled(self, hidden: Tensor) -> Tensor:
        if self.factors is None:
            return hidden
        from fastrl.kernels.row_scaling import scale_rows

        return scale_rows(hidden, self.factors, hidden.dtype)


def scatter_scaled(
    output: Tensor,  # [T, D]
    rows: Tensor,  # [R]
    values: Tensor,  # [R, D]
    factors: Tensor | None,  # [R]
) -> None:
    """output[rows] = factors[:, None] * values, rounded once; None is 1."""
    if can_run(values):
        from fastrl.kernels.row_scaling import scatter_scaled_rows

        scatter_scaled_rows(output, values, factors, rows)
        return
    assert factors is None, "only kernels leave factors"
    output.index_copy_(0, rows, values.to(output.dtype))


def scaled(
    grads: Sequence[Tensor | None], factor: Tensor, *, in_place: bool
) -> list[Tensor | None]:
    """Each of `grads` times `factor` (a scalar tensor), without synchronisation."""
    if not in_place:
        return [None if grad is None else grad * factor for grad in grads]
    there = [grad for grad in grads if grad is not None]
    if there and all(map(can_run, there)):
        from fastrl.kernels.row_scaling import scale_in_place

        scale_in_place(there, factor)
    else:
        for grad in there:
            grad.mul_(factor)
    return list(grads)
