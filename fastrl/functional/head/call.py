"""One call of the streaming head: its checked inputs, its bounds, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl.functional.head.matmul import compute_dtype
from fastrl.functional.head.running import merge_running_statistics
from fastrl.kernels.arguments import LogitTransform, VocabularyTile
from fastrl.parallel import (
    ParallelGroups,
    gather_first_dim,
    group_rank,
    group_size,
    vocab_shard,
)

# Elements of a weight's gradient that are widened at a time: 64 MiB in fp32.
_REDUCED_ELEMENTS = 2**24
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class HeadCall:
    """What the strategies need beside the differentiable tensors."""

    labels: Tensor  # [T]
    rows: Tensor  # [R] the labelled tokens
    transform: LogitTransform  # of [T]
    vocab_size: int
    first_column: int  # vocabulary index of this rank's first weight row
    entropy: bool
    chunk_size: int | None
    max_logits_bytes: int
    groups: ParallelGroups
    drop_inactive_rows: bool = False

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.labels.shape[0]

    @property
    def gathers_hidden_states(self) -> bool:
        """Whether hidden states are a slice of tokens whose logits need every tp rank."""
        return self.groups.tp is not None and self.groups.sp is not None

    def tile(self, bias: Tensor | None, first: int, last: int) -> VocabularyTile:
        """The tile of logits of this rank's weight rows [first, last)."""
        column = self.first_column + first
        valid = min(max(self.vocab_size - column, 0), last - first)
        # Kernels take the columns' biases one after the other.
        return VocabularyTile(
            column, valid, None if bias is None else bias[first:last].contiguous()
        )

    def gather_hidden(self, hidden_states: Tensor) -> Tensor:
        """[T, D]: all tokens' hidden states, gathered over `sp` where they are sharded."""
        if not self.gathers_hidden_states:
            return hidden_states
        assert self.groups.sp is not None
        return gather_first_dim(hidden_states, self.groups.sp)

    def merge_over_vocabulary(self, statistics: Tensor) -> Tensor:  # [4, R]
        """Running statistics of the whole vocabulary: one all-gather over `tp`."""
        if self.groups.tp is None:
            return statistics
        parts = gather_first_dim(statistics, self.groups.tp)
        return merge_running_statistics(parts.view(group_size(self.groups.tp), *statistics.shape))

    def rows_with_gradient(self, rows: Tensor, *grads: Tensor | None) -> Tensor:  # [R], [T] each
        """Those of `rows` at which an upstream gradient is not 0; all, unless told to drop them.

        Waits for the device. One all-reduce over `tp`: ranks whose gradients differ in the last bit
        must not differ in their rows.
        """
        if not self.drop_inactive_rows:
            return rows
        is_active = torch.zeros(rows.shape, dtype=torch.int32, device=rows.device)
        for grad in grads:
            if grad is not None:
                is_active |= grad[rows] != 0
        if self.groups.tp is not None:
            dist.all_reduce(is_active, op=dist.ReduceOp.MAX, group=self.groups.tp)
        return rows[is_active.bool()]

    def finish_weight_gradient(self, grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The gradient of weight or bias in `dtype`; destroys `grad`.

        That of a weight replicated over `sp` is summed over the slices of the tokens, in
        `compute_dtype` and piece by piece: a sum in 16 bits would round once a rank.
        """
        if grad is None:
            return None
        if self.groups.sp is not None and self.groups.tp is None:
            for part in grad.split(max(_REDUCED_ELEMENTS // grad[0].numel(), 1)):
                wide = part.to(compute_dtype(part.dtype))
                dist.all_reduce(wide, group=self.groups.sp)
                part.copy_(wide)
        return grad.to(dtype)


def scatter_rows(values: Tensor, rows: Tensor, num_tokens: int) -> Tensor:
    """[T, ...] with `values` [R, ...] at `rows` and 0 elsewhere."""
    if values.shape[0] == num_tokens:
        return values
    return values.new_zeros(num_tokens, *values.shape[1:]).index_copy_(0, rows, values)


def check_inputs(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    transform: LogitTransform,
    vocab_size: int | None,
    weight_rows: int | None,
    groups: ParallelGroups | None,
    chunk_size: int | None,
    max_logits_bytes: int,
    entropy: bool,
    rows: Tensor | None,
    drop_inactive_rows: bool = False,
) -> HeadCall:
    """The call, or a ValueError (TypeError) that names the argument that does not fit."""
    groups = groups or ParallelGroups()
    _check_tensors(hidden_states, weight, bias)
    tp_size, tp_rank = group_size(groups.tp), group_rank(groups.tp)
    weight_rows = weight.shape[0] * tp_size if weight_rows is None else weight_rows
    start, stop = vocab_shard(weight_rows, tp_rank, tp_size)
    if stop - start != weight.shape[0]:
        raise ValueError(
            f"`weight` must hold rows [{start}, {stop}) of the {weight_rows} rows of the whole"
            f" weight on rank {tp_rank} of {tp_size}, got {weight.shape[0]} rows; shard it by"
            " `vocab_shard`."
        )
    vocab_size = weight_rows if vocab_size is None else vocab_size
    if not 0 < vocab_size <= weight_rows:
        raise ValueError(
            f"`vocab_size` must be between 1 and the {weight_rows} rows of the weight,"
            f" got {vocab_size}."
        )
    shards = group_size(groups.sp) if groups.tp is not None else 1
    _check_labels(labels, hidden_states, hidden_states.shape[0] * shards, vocab_size)
    _check_transform(transform, labels)
    if isinstance(transform.temperature, Tensor):
        # A wider temperature would widen the logits, tile by tile.
        temperature = transform.temperature.to(compute_dtype(hidden_states.dtype))
        transform = replace(transform, temperature=temperature)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1 row or None, got {chunk_size}.")
    if max_logits_bytes < 1:
        raise ValueError(f"`max_logits_bytes` must be positive, got {max_logits_bytes}.")
    return HeadCall(
        labels=labels,
        rows=(labels != -100).nonzero()[:, 0] if rows is None else rows,
        transform=transform,
        vocab_size=vocab_size,
        first_column=start,
        entropy=entropy,
        chunk_size=chunk_size,
        max_logits_bytes=max_logits_bytes,
        groups=groups,
        drop_inactive_rows=drop_inactive_rows,
    )


def _check_tensors(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight), ("bias", bias)):
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"`{name}` must be a plain tensor, got a DTensor; pass `{name}.full_tensor()`, or"
                " run the head inside the module that `fully_shard` wraps."
            )
    if hidden_states.ndim != 2 or hidden_states.dtype not in FLOAT_DTYPES:
        raise ValueError(
            "`hidden_states` must be bf16, fp16, fp32 or float64 of shape [T, D], got"
            f" {hidden_states.dtype} {list(hidden_states.shape)}; flatten packed batches first."
        )
    if (
        weight.ndim != 2
        or weight.shape[1] != hidden_states.shape[1]
        or weight.dtype != hidden_states.dtype
    ):
        raise ValueError(
            f"`weight` must be {hidden_states.dtype} of shape [V, {hidden_states.shape[1]}] like"
            f" `hidden_states`, got {weight.dtype} {list(weight.shape)}; cast or gather it first"
            " (a weight sharded by ZeRO-3 is empty outside of its module)."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"`bias` must be {weight.dtype} of shape [{weight.shape[0]}], one a row of `weight`,"
            f" got {bias.dtype} {list(bias.shape)}."
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden_states.device:
            raise ValueError(
                f"`{name}` must be on the device of `hidden_states`, {hidden_states.device}, got"
                f" {tensor.device}."
            )


def _check_labels(labels: Tensor, hidden_states: Tensor, num_tokens: int, vocab_size: int) -> None:
    if labels.dtype != torch.int64 or labels.shape != (num_tokens,):
        raise ValueError(
            f"`labels` must be int64 of shape [{num_tokens}] (one a hidden state), got"
            f" {labels.dtype} {list(labels.shape)}; labels are shifted before packing."
        )
    if labels.device != hidden_states.device:
        raise ValueError(
            f"`labels` must be on the device of `hidden_states`, {hidden_states.device}, got"
            f" {labels.device}."
        )
    valid = ((labels >= 0) & (labels < vocab_size)) | (labels == -100)
    message = f"`labels` must be -100 (none) or in [0, {vocab_size})"
    if labels.is_cuda:
        torch._assert_async(valid.all(), message)
    elif not bool(valid.all()):
        wrong = labels[~valid][0].item()
        raise ValueError(f"{message}, got {wrong}; is `vocab_size` that of the tokenizer?")


def _check_transform(transform: LogitTransform, labels: Tensor) -> None:
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        if temperature.shape != labels.shape or not temperature.is_floating_point():
            raise ValueError(
                f"`temperature` must be a number or a float tensor of shape {list(labels.shape)},"
                f" got {temperature.dtype} {list(temperature.shape)}."
            )
        if temperature.device != labels.device:
            raise ValueError(
                f"`temperature` must be on the device of `labels`, {labels.device}, got"
                f" {temperature.device}."
            )
        if temperature.requires_grad:
            raise ValueError(
                "`temperature` must not require a gradient, of which there is none; detach it."
            )
    elif not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature}.")
    if transform.softcap is not None and not transform.softcap > 0:
        raise ValueError(f"`softcap` must be positive or None, got {transform.softcap}.")
