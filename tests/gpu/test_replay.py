"""Recorded sampling sets beside documents without, by the kernels, against float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from fastrl import Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch

pytestmark = pytest.mark.gpu
VOCAB_SIZE, HIDDEN_SIZE = 3000, 256


def documents() -> list[Document]:
    """Every other one with sets: of the label alone, with doubles, of many ids."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    def sets(tokens: list[int]) -> list[list[int]]:
        return [[token, *ids(n * n % 60), 0, 0][: 1 + n % 40] for n, token in enumerate(tokens)]

    drawn = [ids(60) for _ in range(6)]
    return [
        Document(
            tokens,
            prompt_length=20,
            advantage=0.5 - number % 3,
            kept_tokens=sets(tokens[20:]) if number % 2 else None,
        )
        for number, tokens in enumerate(drawn)
    ]


@contextmanager
def without_waiting() -> Iterator[None]:
    """Whatever waits for the device is an error."""
    with warnings.catch_warnings():  # it says that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients(dtype: torch.dtype, main_grad: bool) -> list[Tensor]:
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": HIDDEN_SIZE,
            "vocab_size": VOCAB_SIZE,
            "losses": {"policy": {"type": "reinforce", "entropy": {"bonus": 0.1}}},
            "keep": {"recorded": True},
        }
    )
    head = LanguageModelHead(config, device="cuda", dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(4)
    (batch,) = TokenBatch.from_documents(documents()).to_kwargs(device="cuda")
    size = (batch.num_tokens, HIDDEN_SIZE)
    hidden = torch.randn(size, generator=generator, device="cuda").bfloat16().to(dtype)
    weight = torch.randn(head.weight.shape, generator=generator, device="cuda").mul_(0.1)
    with torch.no_grad():
        head.weight.copy_(weight.bfloat16())
    buffer = torch.zeros_like(head.weight, dtype=torch.float32) if main_grad else None
    hidden.requires_grad_()
    with nullcontext() if dtype == torch.float64 else without_waiting():
        loss = head(hidden, batch, main_grad=buffer).loss
        loss.backward()
    assert hidden.grad is not None
    grad_weight = head.weight.grad if buffer is None else buffer
    assert grad_weight is not None
    return [loss.detach().double(), hidden.grad.double(), grad_weight.double()]


@pytest.mark.parametrize("main_grad", [False, True])
def test_mixed_documents_are_those_of_float64(main_grad: bool) -> None:
    found = gradients(torch.bfloat16, main_grad)
    for value, exact in zip(found, gradients(torch.float64, False), strict=True):
        assert (value - exact).norm() <= 4e-3 * exact.norm()
    for value, again in zip(found, gradients(torch.bfloat16, main_grad), strict=True):
        assert torch.equal(value, again)
