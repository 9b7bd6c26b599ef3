"""SAPO's gate far above 1, where a sigmoid in fp32 is almost or exactly 1; found by tests/fuzz."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter

from fastrl import Document, TokenBatch, TokenStatistics
from fastrl.config import AnyLossConfig
from fastrl.layers.losses import build_loss


@pytest.mark.parametrize("log_ratio", [0.0, 2.0, 3.0, 4.0])
def test_the_gradient_of_a_saturated_gate_keeps_its_digits(log_ratio: float) -> None:
    old = [-9.0, -9.0]
    document = Document([0, 1], prompt_length=1, logprobs=[old[0]], advantage=1.0)
    (batch,) = TokenBatch.from_documents([document]).to_kwargs()
    config = TypeAdapter(AnyLossConfig).validate_python({"type": "sapo"})
    grads = []
    for dtype in (torch.float32, torch.float64):
        logprobs = torch.tensor([old[0] + log_ratio, 0.0], dtype=dtype, requires_grad=True)
        none = torch.zeros(2, dtype=dtype)
        loss = build_loss(config)(TokenStatistics(logprobs, none, none), batch)
        (grad,) = torch.autograd.grad(loss, [logprobs])
        grads.append(grad[0].double())
    assert grads[1] != 0
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=0)
