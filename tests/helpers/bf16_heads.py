"""A head in bf16, on the GPU unless told otherwise, and batches for it."""

from __future__ import annotations

from typing import Any

import torch

from fastrl import BatchKwargs, Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch

BF16 = torch.bfloat16


def grpo_batch(
    num_documents: int,
    length: int,
    vocab_size: int,
    *,
    device: torch.device | str = "cuda",
    **changes: Any,
) -> BatchKwargs:
    generator = torch.Generator().manual_seed(5)
    documents = [
        Document(
            tokens=torch.randint(vocab_size, (length,), generator=generator).tolist(),
            prompt_length=length // 3,
            logprobs=[-7.0] * (length - length // 3),
            advantage=float(torch.randn((), generator=generator)) if i % 4 else 0.0,
        )
        for i in range(num_documents)
    ]
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    return batch.to(device).replace(**changes)


def grpo_head(
    hidden_size: int, vocab_size: int, *, device: torch.device | str = "cuda", **config: Any
) -> LanguageModelHead:
    loss = {"type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    defaults = {"hidden_size": hidden_size, "vocab_size": vocab_size, "losses": {"policy": loss}}
    return LanguageModelHead(
        LanguageModelHeadConfig.model_validate(defaults | config), device=device, dtype=BF16
    )
