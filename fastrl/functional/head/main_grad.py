"""A caller's buffer for the weight's gradient, in place of one that autograd is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall, HeadOperands
from fastrl.functional.head.checks import check_tensor
from fastrl.functional.head.matmul import accumulation_dtype
from fastrl.functional.head.sharding import finish_weight_gradient
from fastrl.parallel import head_splits_tokens


def with_main_grad(operands: HeadOperands, main_grad: Tensor | None) -> HeadOperands:
    """The operands of a call that is given a buffer for the weight's gradient.

    Raises:
        ValueError: its shape, dtype or device is not the weight's, or there is no gradient.
        TypeError: it is no plain tensor.
    """
    if main_grad is None:
        return operands
    check_tensor("main_grad", main_grad)
    weight = operands.weight
    dtypes = {weight.dtype, accumulation_dtype(weight.dtype)}
    if main_grad.shape != weight.shape or main_grad.dtype not in dtypes:
        raise ValueError(
            f"`main_grad` must be {' or '.join(sorted(map(str, dtypes)))} of shape"
            f" {list(weight.shape)} like `weight`, got {main_grad.dtype} {list(main_grad.shape)}."
        )
    if main_grad.device != weight.device:
        raise ValueError(
            f"`main_grad` must be on the device of `weight`, {weight.device}, got"
            f" {main_grad.device}."
        )
    if not torch.is_grad_enabled():
        raise ValueError(
            "`main_grad` must not be given without gradients: nothing would be added to it; leave"
            " it out."
        )
    if not weight.requires_grad or operands.low_rank_weight is not None:
        raise ValueError(
            "`main_grad` must not be given for a weight that has no gradient of its own: nothing"
            " would be added to it; leave it out."
        )
    return replace(operands, main_grad=main_grad)


def added_to_main_grad(call: HeadCall) -> Tensor | None:
    """The buffer that a weight's gradient is added to as it is formed.

    None without one, and where the gradient is first summed over ranks that hold the same weight.
    """
    return None if head_splits_tokens(call.groups) else call.main_grad


def deliver_weight_gradient(
    grad: Tensor | None,
    call: HeadCall,
) -> Tensor | None:
    """`finish_weight_gradient` of the weight, for autograd; None once it is in `main_grad`."""
    finished = finish_weight_gradient(grad, call.gradient_dtypes[1], call.groups)
    return added(finished, call.main_grad)


def added(grad: Tensor | None, main_grad: Tensor | None) -> Tensor | None:
    """None once a gradient is added to its buffer; itself without one."""
    if grad is None or main_grad is None:
        return grad
    main_grad.add_(grad)
    return None
