"""The head inside the module call of an output layer, in the place of its logits.

What hangs on the layer (FSDP2's gathering, hooks) then happens to the head too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def replaced_forward(
    layer: nn.Module, forward: Callable[..., Any], *, otherwise: str
) -> Iterator[None]:
    """Lets a call of `layer` give `forward` of its inputs.

    While `forward` runs the layer is itself, with its weights gathered where a hook does that.

    Args:
        layer: the output layer.
        forward: what runs in the place of the layer's own.
        otherwise: what to do where that cannot be, for the message.

    Raises:
        ValueError: something else has replaced its `forward` already.
    """
    if "forward" in vars(layer):
        raise ValueError(
            f"The output layer {type(layer).__name__} must have its own forward, but it is replaced"
            f" by {vars(layer)['forward']}, as accelerate's offloading does; {otherwise}."
        )

    def once(*args: Any, **kwargs: Any) -> Any:
        del layer.__dict__["forward"]
        try:
            return forward(*args, **kwargs)
        finally:
            layer.__dict__["forward"] = once

    layer.__dict__["forward"] = once
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def layer_operands(layer: nn.Module) -> dict[str, Any]:
    """`weight` and `bias` for the head, inside the layer's call: its hooks have run already."""
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        return {"weight": layer.weight, "bias": layer.bias}
    return {"weight": layer}


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast would run the output layer; None without."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
