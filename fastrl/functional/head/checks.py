"""The checks of one call of the head: every error is raised before any collective."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl.functional.head.call import CallOptions, HeadCall, HeadOperands
from fastrl.functional.head.matmul import accumulation_dtype
from fastrl.functional.head.merge_tree import MergeTree
from fastrl.functional.value_checks import require_all
from fastrl.kernels.arguments import LogitTransform
from fastrl.parallel import ParallelGroups, group_rank, group_size, vocab_shard

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_inputs(
    operands: HeadOperands,
    labels: Tensor,
    *,
    transform: LogitTransform,
    vocab_size: int | None,
    weight_rows: int | None,
    groups: ParallelGroups | None,
    rows: Tensor | None,
    options: CallOptions,
    label_bound: int | None = None,
) -> HeadCall:
    """The checked call of the arguments of `linear_logprobs`, with its errors.

    Labels are not looked at where `label_bound`, a number above all of them, is known.
    """
    groups = groups or ParallelGroups()
    _check_operands(operands, groups)
    hidden_states, weight = operands.hidden_states, operands.weight
    dtype = operands.operand_dtype
    tp_size, tp_rank = group_size(groups.tp), group_rank(groups.tp)
    weight_rows = weight.shape[0] * tp_size if weight_rows is None else weight_rows
    start = _first_row(weight, weight_rows, tp_rank, tp_size)
    vocab_size = weight_rows if vocab_size is None else vocab_size
    if not 0 < vocab_size <= weight_rows:
        raise ValueError(
            f"`vocab_size` must be between 1 and the {weight_rows} rows of the weight,"
            f" got {vocab_size}."
        )
    shards = group_size(groups.sp) if groups.tp is not None else 1
    _check_labels(labels, hidden_states, hidden_states.shape[0] * shards)
    _check_label_values(labels, vocab_size, label_bound)
    _check_transform(transform, labels)
    if isinstance(transform.temperature, Tensor):
        # A wider temperature would widen the logits, tile by tile.
        temperature = transform.temperature.to(accumulation_dtype(dtype))
        transform = replace(transform, temperature=temperature.expand(labels.shape))
    _check_options(options)
    if options.deterministic:
        _check_deterministic(operands, MergeTree(weight_rows, tp_size))
    return HeadCall(
        hidden_states=hidden_states,
        weight=weight,
        bias=operands.bias,
        low_rank_weight=operands.low_rank_weight,
        operand_dtype=dtype,
        gradient_dtypes=operands.dtypes,
        labels=labels,
        rows=(labels != -100).nonzero()[:, 0] if rows is None else rows,
        transform=transform,
        vocab_size=vocab_size,
        weight_rows=weight_rows,
        first_column=start,
        groups=groups,
        options=options,
        main_grad=operands.main_grad,
    )


def _first_row(weight: Tensor, weight_rows: int, tp_rank: int, tp_size: int) -> int:
    """The first of the whole weight's rows that this rank holds."""
    start, stop = vocab_shard(weight_rows, tp_rank, tp_size)
    if tp_size == 1 and weight_rows != weight.shape[0]:
        raise ValueError(
            f"`weight` must have {weight_rows} rows, the vocabulary and its padding, got"
            f" {weight.shape[0]}; make `weight_rows`, or a head's `vocab_size` or"
            " `padded_vocab_size`, those of the weight."
        )
    if stop - start != weight.shape[0]:
        raise ValueError(
            f"`weight` must hold rows [{start}, {stop}) of the {weight_rows} rows of the whole"
            f" weight on rank {tp_rank} of {tp_size}, got {weight.shape[0]} rows; shard it by"
            " `vocab_shard`."
        )
    return start


def _check_deterministic(operands: HeadOperands, tree: MergeTree) -> None:
    if operands.low_rank_weight is not None:
        raise ValueError(
            "`deterministic` must be False with a LoRA layer as `weight`, whose product with A"
            " depends on the other rows of the batch; merge the adapter."
        )
    tree.check_shards()


def _check_operands(operands: HeadOperands, groups: ParallelGroups) -> None:
    if operands.low_rank_weight is not None and (groups.tp, groups.sp) != (None, None):
        raise ValueError(
            "`weight` must not be a LoRA layer under vocabulary or sequence parallelism: the"
            " gradient of its A would be that of this rank's tokens; merge the adapter, or use data"
            " parallelism."
        )
    hidden_states, weight, bias = operands.hidden_states, operands.weight, operands.bias
    named = {"hidden_states": hidden_states, "weight": weight, "bias": bias}
    for name, tensor in named.items():
        if name != "bias" or tensor is not None:
            check_tensor(name, tensor)
    if operands.dtype is not None and operands.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"`compute_dtype` must be bf16, fp16, fp32, float64 or None, got {operands.dtype}."
        )
    if hidden_states.ndim != 2 or hidden_states.dtype not in FLOAT_DTYPES:
        raise ValueError(
            "`hidden_states` must be bf16, fp16, fp32 or float64 of shape [T, D], got"
            f" {hidden_states.dtype} {list(hidden_states.shape)}; flatten packed batches first."
        )
    width = hidden_states.shape[1]
    if operands.low_rank_weight is not None:
        width -= operands.low_rank_weight.shape[1]
    # With `compute_dtype` both are converted.
    dtype = hidden_states.dtype if operands.dtype is None else weight.dtype
    if weight.ndim != 2 or weight.shape[1] != width or weight.dtype != dtype:
        raise ValueError(
            f"`weight` must be {dtype} of shape [V, {width}] like `hidden_states`, got"
            f" {weight.dtype} {list(weight.shape)}; cast or gather it first (a weight sharded by"
            " ZeRO-3 is empty outside of its module), or give `compute_dtype`."
        )
    if weight.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"`weight` must be bf16, fp16, fp32 or float64, got {weight.dtype}; a quantised weight"
            " must be dequantised first."
        )
    if bias is not None and (
        bias.shape != weight.shape[:1] or (operands.dtype is None and bias.dtype != weight.dtype)
    ):
        raise ValueError(
            f"`bias` must be {weight.dtype} of shape [{weight.shape[0]}], one a row of `weight`,"
            f" got {bias.dtype} {list(bias.shape)}."
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            _check_device(name, tensor, "hidden_states", hidden_states)


def check_tensor(name: str, tensor: object) -> None:
    """Raises a TypeError where a plain tensor is required and something else came."""
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"`{name}` must be a plain tensor, got a DTensor; pass `{name}.full_tensor()`, or"
            " run the head inside the module that `fully_shard` wraps."
        )
    if not isinstance(tensor, Tensor):
        remedy, found = "", "None" if tensor is None else f"a {type(tensor).__name__}"
        if name == "hidden_states":
            remedy = "; a model's output has them as `last_hidden_state`, or as its first element"
        raise TypeError(f"`{name}` must be a tensor, got {found}{remedy}.")


def _check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"`{name}` must be on the device of `{other_name}`, {other.device}, got"
            f" {tensor.device}."
        )


def _check_labels(labels: Tensor, hidden_states: Tensor, num_tokens: int) -> None:
    if labels.dtype != torch.int64 or labels.shape != (num_tokens,):
        raise ValueError(
            f"`labels` must be int64 of shape [{num_tokens}] (one a hidden state), got"
            f" {labels.dtype} {list(labels.shape)}; labels are shifted before packing."
        )
    _check_device("labels", labels, "hidden_states", hidden_states)


def _check_label_values(labels: Tensor, vocab_size: int, label_bound: int | None) -> None:
    message = f"`labels` must be -100 (none) or in [0, {vocab_size})"
    remedy = "; is `vocab_size` that of the tokenizer?"
    if label_bound is None:
        # Inside of the vocabulary, or -100: one of the two.
        valid = (labels.clamp(0, vocab_size - 1) == labels) ^ (labels == -100)
        require_all(valid, message, lambda: f", got {labels[~valid][0].item()}", remedy)
    elif label_bound > vocab_size:
        raise ValueError(f"{message}, got {label_bound - 1}{remedy}")


def _check_transform(transform: LogitTransform, labels: Tensor) -> None:
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        has_shape = temperature.ndim == 0 or temperature.shape == labels.shape
        if not has_shape or not temperature.is_floating_point():
            raise ValueError(
                "`temperature` must be a number or a float tensor of shape [] or"
                f" {list(labels.shape)}, got {temperature.dtype} {list(temperature.shape)}."
            )
        _check_device("temperature", temperature, "labels", labels)
        if temperature.requires_grad:
            raise ValueError(
                "`temperature` must not require a gradient, of which there is none; detach it."
            )
    elif not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature}.")
    scale = transform.logit_scale
    if isinstance(scale, Tensor) or not math.isfinite(scale):
        found = f"a {type(scale).__name__}" if isinstance(scale, Tensor) else scale
        raise ValueError(
            f"`logit_scale` must be a finite number, got {found}; multiply the hidden states by a"
            " scale that is trained."
        )
    if transform.softcap is not None and not transform.softcap > 0:
        raise ValueError(f"`softcap` must be positive or None, got {transform.softcap}.")


def _check_options(options: CallOptions) -> None:
    if options.chunk_size is not None and options.chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1 row or None, got {options.chunk_size}.")
    if options.max_logits_bytes < 1:
        raise ValueError(f"`max_logits_bytes` must be positive, got {options.max_logits_bytes}.")
