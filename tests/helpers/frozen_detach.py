"""Numerical derivatives of functions with detached parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def with_frozen_detach(
    function: Callable[..., Tensor], patch: pytest.MonkeyPatch
) -> Callable[..., Tensor]:
    """`function` whose detached values are constants: those of the first call.

    The derivative of such a function is what autograd computes, so that finite differences of it
    must agree, whatever is detached.
    """
    detach = torch.Tensor.detach
    recorded: list[Tensor] = []

    def frozen(*inputs: Tensor) -> Tensor:
        is_first, calls = not recorded, 0

        def replayed(tensor: Tensor) -> Tensor:
            nonlocal calls
            if is_first:
                recorded.append(detach(tensor).clone())
            value = recorded[calls]
            calls += 1
            return value

        with patch.context() as context:
            context.setattr(torch.Tensor, "detach", replayed)
            return function(*inputs)

    return frozen
