"""The gradient of the hidden states, put together from compact rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.functional.matmul import compute_dtype
from fastrl.functional.problem import HeadProblem
from fastrl.kernels import can_run
from fastrl.parallel import reduce_scatter_first_dim


class HiddenGradient:
    """[T, D], zero but for the rows that are written; rounded to the hidden states' dtype once.

    Rows of partial sums over the vocabulary are all-reduced over `tp`, as compact and unrounded
    rows: fewer bytes than [T, D], and one rounding in all. Where the hidden states are sharded over
    `sp` as well, all [T, D] of them are reduced and scattered at the end.
    """

    def __init__(self, problem: HeadProblem, hidden_states: Tensor) -> None:
        self._groups = problem.groups
        self._dtype = hidden_states.dtype
        self._splits_tokens = problem.groups.tp is not None and problem.groups.sp is not None
        self._total = torch.zeros(
            problem.num_tokens,
            hidden_states.shape[1],
            dtype=compute_dtype(self._dtype) if self._splits_tokens else self._dtype,
            device=hidden_states.device,
        )

    def write(
        self,
        rows: Tensor,  # [R]
        values: Tensor,  # [R, D] in compute_dtype
        factors: Tensor | None = None,  # [R] in compute_dtype
    ) -> None:
        """Sets the rows to factors[:, None] * values; destroys `values`."""
        if self._groups.tp is not None and not self._splits_tokens:
            if factors is not None:
                values.mul_(factors[:, None])
                factors = None
            dist.all_reduce(values, group=self._groups.tp)
        if can_run(values):
            from fastrl.kernels.row_scaling import scatter_scaled_rows

            scatter_scaled_rows(self._total, values, factors, rows)
            return
        assert factors is None, "only kernels leave factors"
        self._total.index_copy_(0, rows, values.to(self._total.dtype))

    def finish(self) -> Tensor:
        """The gradient of this rank's hidden states."""
        if not self._splits_tokens:
            return self._total
        assert self._groups.sp is not None
        return reduce_scatter_first_dim(self._total, self._groups.sp).to(self._dtype)
