"""Gradients that are not finite at chosen updates, on this rank alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fastrl import HeadOutput
from fastrl.training.phases import Phase


def poison(
    monkeypatch: pytest.MonkeyPatch, updates: Collection[int], bad: float = float("nan")
) -> None:
    """Puts `bad` into one number of this rank's gradients after the backward of each of `updates`.

    The last number: every tensor rank holds all rows of the embedding's gradient and keeps its own
    ones, which the last rank's are.

    Args:
        monkeypatch: of the test.
        updates: by their number in the process, from 0.
        bad: the number.
    """
    backward = Phase._backward
    number = 0

    def poisoned(phase: Phase, *args: Any, **options: Any) -> Sequence[HeadOutput]:
        nonlocal number
        outputs = backward(phase, *args, **options)
        if number in updates:
            grads = [parameter.grad for parameter in phase._context.model.module.parameters()]
            grad = next(grad for grad in grads if grad is not None)
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            with torch.no_grad():
                local.view(-1)[-1] = bad
        number += 1
        return outputs

    monkeypatch.setattr(Phase, "_backward", poisoned)
