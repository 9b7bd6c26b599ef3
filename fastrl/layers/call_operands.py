"""What a call of the head multiplies: its own parameters, or the weight that the call is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fastrl.functional.head.call import HeadOperands, as_operand
from fastrl.functional.head.main_grad import with_main_grad
from fastrl.functional.head.output_layer import head_operands
from fastrl.functional.head.tile_ops import chunk_itemsize
from fastrl.layers.head_plan import OperandFacts


def call_operands(
    hidden_states: Tensor,  # [T, D] or [B, L, D]
    own: tuple[Tensor, Tensor | None] | None,
    weight: Tensor | nn.Module | None,  # [V, D]
    bias: Tensor | None,  # [V]
    compute_dtype: torch.dtype | None,
    main_grad: Tensor | None,  # [V, D]
    tp: ProcessGroup | None,
) -> HeadOperands:
    """The operands of a call, this rank's parts as plain tensors.

    Args:
        hidden_states: as given to the head.
        own: this rank's weight and bias of the head; None without parameters.
        weight: what the call was given, as are the next three.
        bias: beside it.
        compute_dtype: of the operands of the products.
        main_grad: a buffer that the weight's gradient is added to.
        tp: the group that shards the vocabulary.

    Raises:
        ValueError: both or neither of the weights, or a buffer that does not fit.
        TypeError: a weight whose layout the head does not take.
    """
    if hidden_states.ndim > 2:
        hidden_states = hidden_states.flatten(0, -2)
    if own is not None:
        if weight is not None or bias is not None:
            raise ValueError(
                "`weight` and `bias` must not be given to a head that has its own; make it with"
                " `owns_weight=False`."
            )
        return with_main_grad(HeadOperands(hidden_states, *own, dtype=compute_dtype), main_grad)
    if weight is None:
        raise ValueError(
            "`weight` must be given to a head without parameters, got None; pass the"
            " model's output layer."
        )
    operands = head_operands(hidden_states, weight, bias, compute_dtype)
    low_rank = operands.low_rank_weight
    local = replace(
        operands,
        weight=local_tensor(operands.weight, tp),
        bias=None if operands.bias is None else local_tensor(operands.bias, tp),
        low_rank_weight=None if low_rank is None else local_tensor(low_rank, tp),
    )
    return with_main_grad(local, main_grad)


def local_tensor(parameter: Tensor, tp: ProcessGroup | None) -> Tensor:
    """This rank's part of a parameter as a plain tensor.

    Raises:
        TypeError: it is sharded otherwise than over the vocabulary.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    is_sharded = any(not placement.is_replicate() for placement in parameter.placements)
    if parameter.device_mesh.ndim > 1 or (is_sharded and tp is None):
        raise TypeError(
            "`weight` and `bias` must be whole but for vocabulary parallelism, got a DTensor"
            f" with placements {parameter.placements}; call the head inside the module that"
            " `fully_shard` wraps, which gathers them."
        )
    return parameter.to_local()


def needs_gradient(operands: HeadOperands) -> bool:
    """Whether the call is part of a graph."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in operands.tensors)


def operand_facts(operands: HeadOperands) -> OperandFacts:
    """What the strategy depends on: layouts, not the tensors' rows."""
    dtype = operands.operand_dtype
    hidden, weight = (
        tensor if tensor.dtype == dtype else as_operand(tensor[:0], dtype)
        for tensor in (operands.hidden_states, operands.weight)
    )
    itemsize = chunk_itemsize(hidden, weight)
    return OperandFacts(dtype, itemsize, operands.low_rank_weight is not None)
