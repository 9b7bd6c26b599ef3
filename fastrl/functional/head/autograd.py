"""Decorators of the head's autograd functions: device, precision, and no second order."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")


def exactly(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """A forward or backward on the device of its first tensor, and without autocast.

    Triton launches on the current device, not on that of the arguments. Autocast would round the
    operands of fp32 products, and so the logits, to 16 bits.
    """

    @wraps(function)
    def on_device(ctx: Any, *arguments: Any) -> ResultT:
        tensor = next(argument for argument in arguments if isinstance(argument, Tensor))
        device = tensor.device
        is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
        if is_current and not torch.is_autocast_enabled(device.type):
            return function(ctx, *arguments)
        with torch.cuda.device_of(tensor), torch.autocast(device.type, enabled=False):
            return function(ctx, *arguments)

    return on_device


def first_order(backward: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """A backward that raises if it is itself differentiated.

    `once_differentiable` stays silent when the upstream gradient does not require grad.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> ResultT:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of the head must not be differentiated again; call `backward` or"
                " `grad` without `create_graph`."
            )
        return backward(ctx, *grads)

    return checked
