"""The value head: hidden states in; values, their loss and its metrics out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_dataclass

from fastrl.config.heads import ValueLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.head.checks import FLOAT_DTYPES, check_tensor
from fastrl.functional.linear_values import linear_values
from fastrl.functional.statistics import TokenStatistics
from fastrl.functional.streams import of_stream
from fastrl.layers.head_plan import check_is_batch, own_tokens
from fastrl.layers.losses.value import ValueLoss
from fastrl.parallel import (
    ParallelGroups,
    gather_first_dim,
    group_rank,
    group_size,
    head_splits_tokens,
)


@dataclass(frozen=True)
class ValueOutput:
    """Output of the value head.

    Attributes:
        loss: scalar fp32, weighted: this rank's part of the global loss, to be added to that of the
            language-model head; None in evaluation mode unless `compute_loss` asks for it.
        metrics: detached scalars `value/<metric>`, to be added over micro-batches and ranks.
        values: [T] fp32, detached; 0 without label.
    """

    loss: Tensor | None
    metrics: dict[str, Tensor]
    values: Tensor  # [T]


# As `HeadOutput`: FSDP2 finds its tensors.
register_dataclass(ValueOutput)


class ValueHead(nn.Module):
    """A scalar of each token's hidden state, trained to predict its return.

        v_t = h_t . w

    Slot t has the value of the state in which `labels[t]` is drawn: that of the token's prefix.

    Args:
        hidden_size: D.
        config: of the loss.
        groups: those of the language-model head (`head.groups`); the weight is whole on all ranks,
            its gradient a part on data and sequence-data ranks, to be summed as that of the head.
        device: of the weight.
        dtype: of the weight; it may be wider than that of the hidden states.

    Attributes:
        weight: [1, D], 0 at first: no state is better than another.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ValueLossConfig | None = None,
        groups: ParallelGroups | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config or ValueLossConfig()
        self.groups = groups or ParallelGroups()
        sp = self.groups.sp if head_splits_tokens(self.groups) else None
        self.loss = ValueLoss(self.config, (self.groups.sdp, sp), self.groups.dp)
        self.weight = nn.Parameter(torch.empty(1, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeroes the weight."""
        nn.init.zeros_(self.weight)

    # Not compiled, as the language-model head.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: Tensor,  # [T, D] or [B, L, D]
        batch: BatchKwargs,
        *,
        compute_loss: bool | None = None,
    ) -> ValueOutput:
        """Values of the labels; in training mode the loss and its metrics too.

        Args:
            hidden_states: those that the language-model head gets.
            batch: of the same tokens; for a loss with `returns`, and `values` under a clip.
            compute_loss: default: in training mode.

        Raises:
            ValueError: a shape or dtype that does not fit, or a column that the loss needs.
            TypeError: an argument is of another type.
        """
        check_tensor("hidden_states", hidden_states)
        if hidden_states.ndim > 2:
            hidden_states = hidden_states.flatten(0, -2)
        weight = self._checked_weight(hidden_states, batch)
        size = hidden_states.shape[0]
        start = group_rank(self.groups.sp) * size
        rows = batch.rows_with_labels.within(start, start + size).index
        values = linear_values(hidden_states, weight, rows, self.groups)
        loss: Tensor | None = None
        metrics: dict[str, Tensor] = {}
        if self.training if compute_loss is None else compute_loss:
            none = torch.zeros_like(values.detach())
            statistics = TokenStatistics(none, None, none, values=values)
            own = of_stream(own_tokens(batch, self.groups), self.config.stream)
            value, of_loss = self.loss.with_metrics(statistics, own)
            loss = self.config.weight * value
            metrics = {f"value/{name}": each for name, each in of_loss.items()}
        values = values.detach()
        if head_splits_tokens(self.groups):
            assert self.groups.sp is not None
            values = gather_first_dim(values, self.groups.sp)
        return ValueOutput(loss, metrics, values)

    def _checked_weight(self, hidden_states: Tensor, batch: BatchKwargs) -> Tensor:
        check_is_batch(batch)
        if isinstance(self.weight, DTensor):
            raise TypeError(
                "`weight` must be whole, got a DTensor; call the value head inside the module that"
                " `fully_shard` wraps, which gathers it."
            )
        size, width = group_size(self.groups.sp), self.weight.shape[1]
        fits = hidden_states.shape[-1] == width and hidden_states.ndim == 2
        if not fits or hidden_states.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"`hidden_states` must be bf16, fp16, fp32 or float64 of shape [T, {width}], got"
                f" {hidden_states.dtype} {list(hidden_states.shape)}."
            )
        if hidden_states.shape[0] * size != batch.num_tokens:
            raise ValueError(
                f"`hidden_states` must be those of the batch's {batch.num_tokens} tokens, in even"
                f" parts over {size} ranks of `sp`, got {hidden_states.shape[0]}."
            )
        return self.weight
