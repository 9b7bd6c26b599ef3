"""A head for the losses of `loss_cases`: its inputs, a teacher, and how gradients are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import BatchKwargs, LanguageModelHead, LanguageModelHeadConfig
from fastrl.functional.head.distillation import Teacher
from tests.helpers.loss_documents import VOCAB_SIZE

HIDDEN_SIZE = 5
PADDED = 33


def capped_head(losses: dict[str, Any], **options: Any) -> LanguageModelHead:
    """A float64 head with bias, cap and padding."""
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": HIDDEN_SIZE,
            "vocab_size": VOCAB_SIZE,
            "padded_vocab_size": PADDED,
            "bias": True,
            "softcap": 5.0,
            "losses": losses,
        }
        | options
    )
    head = LanguageModelHead(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    return head


def random_hidden(batch: BatchKwargs, size: int = HIDDEN_SIZE, seed: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.num_tokens, size, generator=generator, dtype=torch.float64)


def make_teacher(batch: BatchKwargs) -> Teacher:
    generator = torch.Generator().manual_seed(23)
    weight = torch.randn(PADDED, 7, generator=generator, dtype=torch.float64)
    return Teacher(random_hidden(batch, 7, 29), weight, weight[:, 0].clone(), 4.0, 0.7)


def close_to_policy(head: LanguageModelHead, hidden: Tensor, batch: BatchKwargs) -> BatchKwargs:
    """The batch with old policies near the head's own, so that some ratios are inside of a clip."""
    head.eval()
    logprobs = head(hidden, batch).logprobs
    head.train()
    generator = torch.Generator().manual_seed(31)

    def near(scale: float, centre: Tensor) -> Tensor:
        noise = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
        return (centre + scale * noise).clamp(max=-1e-3)

    assert logprobs is not None
    old = near(0.25, logprobs)
    return batch.replace(
        old_logprobs=old, ref_logprobs=near(0.3, logprobs), rollout_logprobs=near(0.1, old)
    )


def assert_equal_gradients(
    head: LanguageModelHead, hidden: Tensor, actual: Tensor, expected: Tensor, tolerance: float
) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    upstream = torch.tensor(-1.7, dtype=torch.float64)
    inputs = [hidden, *head.parameters()]
    for got, wanted in zip(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
