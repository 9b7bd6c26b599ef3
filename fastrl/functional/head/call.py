"""One call of the head: its tensors, rows, transform and bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastrl.functional.head.matmul import compute_dtype
from fastrl.kernels.arguments import LogitTransform, VocabularyTile
from fastrl.parallel import ParallelGroups


@dataclass(frozen=True)
class CallOptions:
    """How a call of the head is computed.

    Attributes:
        entropy: whether the entropy is computed.
        chunk_size: most rows of logits that may exist at a time.
        max_logits_bytes: most bytes of logits that may exist at a time.
        drop_inactive_rows: whether the backward looks for rows without a gradient.
    """

    entropy: bool
    chunk_size: int | None
    max_logits_bytes: int
    drop_inactive_rows: bool = False

    @property
    def bounds(self) -> tuple[int | None, int]:
        """`chunk_size` and `max_logits_bytes`."""
        return self.chunk_size, self.max_logits_bytes


@dataclass(frozen=True)
class HeadCall:
    """What one call of the head works on, checked (`check_inputs`).

    Attributes:
        hidden_states: [T, D], [T / sp, D] under sequence and vocabulary parallelism.
        weight: [V, D], [V_local, D] under vocabulary parallelism.
        bias: [V] or [V_local].
        labels: [T] int64, -100 is none.
        rows: [R] int64, the labelled tokens.
        transform: from products to logits, of [T].
        vocab_size: V without padding.
        first_column: vocabulary index of this rank's first weight row.
        groups: `tp` shards the vocabulary, `sp` the tokens.
        options: what is computed, and its bounds.
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
        """T."""
        return self.labels.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of logits, statistics and sums."""
        return compute_dtype(self.weight.dtype)

    def on(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> HeadCall:
        """The same call on other tensors: those that autograd saved."""
        return replace(self, hidden_states=hidden_states, weight=weight, bias=bias)

    def without_tensors(self) -> HeadCall:
        """The call for a graph to keep, which saves the differentiable tensors itself."""
        return self.on(_NOTHING, _NOTHING, None)

    def tile(self, first: int = 0, last: int | None = None) -> VocabularyTile:
        """The tile of logits of this rank's weight rows [first, last); default: all of them."""
        last = self.weight.shape[0] if last is None else last
        column = self.first_column + first
        valid = min(max(self.vocab_size - column, 0), last - first)
        # Kernels take the columns' biases one after the other.
        bias = None if self.bias is None else self.bias.detach()[first:last].contiguous()
        return VocabularyTile(column, valid, bias)


_NOTHING = torch.empty(0)


def scatter_rows(values: Tensor, rows: Tensor, num_tokens: int) -> Tensor:
    """[T, ...] with `values` [R, ...] at `rows` and 0 elsewhere."""
    if values.shape[0] == num_tokens:
        return values
    return values.new_zeros(num_tokens, *values.shape[1:]).index_copy_(0, rows, values)
