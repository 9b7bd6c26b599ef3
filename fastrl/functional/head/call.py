"""One call of the head: its tensors, rows, transform and bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastrl.functional.head.matmul import accumulation_dtype
from fastrl.kernels.arguments import LogitTransform, VocabularyTile
from fastrl.parallel import ParallelGroups


@dataclass(frozen=True)
class CallOptions:
    """How a call of the head is computed: the options of `linear_logprobs` of these names."""

    entropy: bool
    chunk_size: int | None
    max_logits_bytes: int
    drop_inactive_rows: bool = False

    @property
    def bounds(self) -> tuple[int | None, int]:
        return self.chunk_size, self.max_logits_bytes


@dataclass(frozen=True)
class HeadCall:
    """The checked arguments of one call of the head (`check_inputs`).

    Attributes:
        hidden_states: [T, D], [T / sp, D] under sequence and vocabulary parallelism.
        weight: [V, D], [V_local, D] under vocabulary parallelism.
        bias: [V] or [V_local].
        labels: [T] int64, -100 = none.
        rows: [R] int64, the labelled tokens.
        transform: from products to logits of all T tokens.
        vocab_size: V without padding.
        first_column: vocabulary index of this rank's first weight row.
        groups: `tp` shards the vocabulary, `sp` the tokens.
        options: what is computed, within which bounds.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    rows: Tensor
    transform: LogitTransform
    vocab_size: int
    first_column: int
    groups: ParallelGroups
    options: CallOptions

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The differentiable tensors: hidden states, weight, bias."""
        return self.hidden_states, self.weight, self.bias

    @property
    def num_tokens(self) -> int:
        return self.labels.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of logits, statistics and sums."""
        return accumulation_dtype(self.weight.dtype)

    def on(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> HeadCall:
        """The same call on other tensors: those that autograd saved."""
        return replace(self, hidden_states=hidden_states, weight=weight, bias=bias)

    def without_tensors(self) -> HeadCall:
        """The call without its differentiable tensors, which autograd saves itself."""
        return self.on(_NOTHING, _NOTHING, None)

    def tile(self, first: int = 0, last: int | None = None) -> VocabularyTile:
        """The tile of logits of this rank's weight rows [first, last); default: all of them."""
        last = self.weight.shape[0] if last is None else last
        column = self.first_column + first
        valid = min(max(self.vocab_size - column, 0), last - first)
        # Kernels read a contiguous bias.
        bias = None if self.bias is None else self.bias.detach()[first:last].contiguous()
        return VocabularyTile(column, valid, bias)


_NOTHING = torch.empty(0)


def scatter_rows(values: Tensor, rows: Tensor, num_tokens: int) -> Tensor:
    """[T, ...] with `values` [R, ...] at `rows` and 0 elsewhere."""
    if values.shape[0] == num_tokens:
        return values
    return values.new_zeros(num_tokens, *values.shape[1:]).index_copy_(0, rows, values)
