"""One call of the head: its operands, rows, transform and bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastrl.functional.head.matmul import accumulation_dtype
from fastrl.functional.head.merge_tree import MergeTree
from fastrl.kernels.arguments import LogitTransform, VocabularyTile
from fastrl.parallel import ParallelGroups, group_size


@dataclass(frozen=True)
class CallOptions:
    """How a call of the head is computed: the options of `linear_logprobs` of these names.

    `is_argmax` asks `recompute` for the statistic of this name, which costs it nothing.
    """

    entropy: bool
    chunk_size: int | None
    max_logits_bytes: int
    drop_inactive_rows: bool = False
    is_argmax: bool = False
    deterministic: bool = False

    @property
    def bounds(self) -> tuple[int | None, int]:
        return self.chunk_size, self.max_logits_bytes


@dataclass(frozen=True)
class HeadOperands:
    """What the products are of: h W^T, or [h, u] [W, B]^T with a low-rank part.

    Attributes:
        hidden_states: [T, D], [T / sp, D] under sequence and vocabulary parallelism; with a
            low-rank part [h, u] of width D + r.
        weight: [V, D], [V_local, D] under vocabulary parallelism.
        bias: [V] or [V_local].
        low_rank_weight: B [V, r], rows as those of `weight`; never joined with it but for a slab.
        dtype: of the operands of the products; None: that of both tensors.
        main_grad: a buffer like `weight`, in its dtype or the wider one of sums, to which the
            backward adds the weight's gradient; autograd gets none for it.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    low_rank_weight: Tensor | None = None
    dtype: torch.dtype | None = None
    main_grad: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are there: hidden states, weight, bias, low-rank weight."""
        every = (self.hidden_states, self.weight, self.bias, self.low_rank_weight)
        return [tensor for tensor in every if tensor is not None]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of hidden states, weight and low-rank weight, as they are given."""
        low_rank = self.weight if self.low_rank_weight is None else self.low_rank_weight
        return self.hidden_states.dtype, self.weight.dtype, low_rank.dtype

    @property
    def operand_dtype(self) -> torch.dtype:
        """dtype of the operands of the products."""
        return self.dtype or self.hidden_states.dtype


@dataclass(frozen=True)
class WeightPart:
    """A weight [V, K] of the products, and the columns of the hidden states that it multiplies."""

    columns: slice
    weight: Tensor
    gradient_dtype: torch.dtype


@dataclass(frozen=True)
class HeadCall:
    """The checked arguments of one call of the head (`check_inputs`).

    Attributes:
        hidden_states: as in `HeadOperands`, like the next three.
        weight: like `hidden_states` in the dtype of the operands.
        bias: in any dtype.
        low_rank_weight: in the dtype of the operands.
        operand_dtype: dtype of the operands of the products.
        gradient_dtypes: of the gradients of hidden states, weight and low-rank weight: those of
            the given tensors.
        labels: [T] int64, -100 = none.
        rows: [R] int64, the labelled tokens.
        transform: from products to logits of all T tokens.
        vocab_size: V without padding.
        weight_rows: rows of the whole weight.
        first_column: vocabulary index of this rank's first weight row.
        groups: `tp` shards the vocabulary, `sp` the tokens.
        options: what is computed, within which bounds.
        main_grad: as in `HeadOperands`.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    low_rank_weight: Tensor | None
    operand_dtype: torch.dtype
    gradient_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    labels: Tensor
    rows: Tensor
    transform: LogitTransform
    vocab_size: int
    weight_rows: int
    first_column: int
    groups: ParallelGroups
    options: CallOptions
    main_grad: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The differentiable tensors: hidden states, weight, bias, low-rank weight."""
        return self.hidden_states, self.weight, self.bias, self.low_rank_weight

    @property
    def tree(self) -> MergeTree:
        """By which statistics of columns are merged if the call is deterministic."""
        return MergeTree(self.weight_rows, group_size(self.groups.tp))

    @property
    def num_tokens(self) -> int:
        return self.labels.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of logits, statistics and sums."""
        return accumulation_dtype(self.operand_dtype)

    def on(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank_weight: Tensor | None = None,
    ) -> HeadCall:
        """The same call on other tensors, as operands: those that autograd saved."""
        return replace(
            self,
            hidden_states=as_operand(hidden_states, self.operand_dtype),
            weight=as_operand(weight, self.operand_dtype),
            bias=bias,
            low_rank_weight=None
            if low_rank_weight is None
            else as_operand(low_rank_weight, self.operand_dtype),
        )

    def with_operands(self) -> HeadCall:
        """The same call with its tensors in the dtype of the operands."""
        factors = (self.hidden_states, self.weight, self.low_rank_weight)
        if all(each is None or each.dtype == self.operand_dtype for each in factors):
            return self
        return self.on(*self.tensors)

    def without_tensors(self) -> HeadCall:
        """The call without its differentiable tensors, which autograd saves itself."""
        empty = torch.empty(0, dtype=self.operand_dtype)
        return replace(self, hidden_states=empty, weight=empty, bias=None, low_rank_weight=None)

    def slab(self, first: int, last: int) -> Tensor:  # [S, D + r]
        """This rank's weight rows [first, last); joined with those of a low-rank part, a copy."""
        if self.low_rank_weight is None:
            return self.weight[first:last]
        return torch.cat([self.weight[first:last], self.low_rank_weight[first:last]], dim=1)

    @property
    def parts(self) -> list[WeightPart]:
        """The weight, and the low-rank part where there is one."""
        width = self.weight.shape[1]
        parts = [WeightPart(slice(0, width), self.weight, self.gradient_dtypes[1])]
        if self.low_rank_weight is not None:
            columns = slice(width, None)
            parts.append(WeightPart(columns, self.low_rank_weight, self.gradient_dtypes[2]))
        return parts

    def tile(self, first: int = 0, last: int | None = None) -> VocabularyTile:
        """The tile of logits of this rank's weight rows [first, last); default: all of them."""
        last = self.weight.shape[0] if last is None else last
        column = self.first_column + first
        valid = min(max(self.vocab_size - column, 0), last - first)
        bias = self.bias
        if bias is not None:
            # Kernels read a contiguous bias; a wider one would widen the logits.
            dtype = self.dtype if bias.dtype.itemsize > self.dtype.itemsize else bias.dtype
            bias = bias.detach()[first:last].to(dtype).contiguous()
        return VocabularyTile(column, valid, bias)


def as_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` as an operand of `dtype`: itself, or a contiguous copy."""
    if tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype, memory_format=torch.contiguous_format)
