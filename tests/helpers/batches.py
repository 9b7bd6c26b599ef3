"""Documents, and the loss of a head over them by the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastrl import BatchKwargs, Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
from fastrl.config import (
    CrossEntropyLossConfig,
    GRPOLossConfig,
    GSPOLossConfig,
    LossConfig,
)
from fastrl.functional.reference import head as reference
from fastrl.functional.reference import losses as reference_losses
from fastrl.functional.reference.tokens import Tokens

VOCAB_SIZE = 33
HIDDEN_SIZE = 5


def ragged_documents() -> list[Document]:
    """Ordinary, one-label, one-token, prompt-only, masked, zero-advantage and off-policy ones."""
    generator = torch.Generator().manual_seed(7)

    def document(length: int, prompt_length: int, advantage: float, shift: float = 0.0) -> Document:
        old = -3.5 + shift + 0.4 * torch.randn(length, generator=generator, dtype=torch.float64)
        return Document(
            tokens=torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist(),
            prompt_length=prompt_length,
            logprobs=old.tolist(),
            advantage=advantage,
        )

    masked = Document(
        tokens=[3, 1, 4, 1, 5, 9, 2, 6],
        loss_mask=[False, True, True, False, False, True, False, True],
        logprobs=[-3.0, -3.1, -3.9, -3.2, -3.3, -3.4, -2.9, -3.0],
        advantage=[0.0, 0.5, -1.5, 9.0, 9.0, 0.0, 9.0, 2.0],
    )
    return [
        document(7, 2, 0.5),
        document(5, 4, -1.0),
        document(3, 3, 1.0),
        document(9, 1, 0.0),
        document(1, 0, 1.0),
        masked,
        document(11, 3, 2.0, shift=-40.0),
        document(4, 1, -0.7, shift=30.0),
        document(2, 1, 1.3),
    ]


def padded_head(**config: object) -> LanguageModelHead:
    """A float64 head with padding rows of fixed random values."""
    defaults = {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE, "padded_vocab_size": 37}
    head = LanguageModelHead(
        LanguageModelHeadConfig.model_validate(defaults | config), dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    return head


def content_hidden(batch: BatchKwargs) -> Tensor:
    """Hidden states that depend on token, position and document content, not on packing."""
    generator = torch.Generator().manual_seed(11)
    by_token = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    by_position = torch.randn(64, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    return (by_token[batch.tokens] + by_position[batch.positions]).requires_grad_()


def reference_loss(head: LanguageModelHead, hidden: Tensor, batch: BatchKwargs) -> Tensor:
    """The weighted sum of the head's losses, logits materialised, in plain loops."""
    config = head.config
    z = reference.logits(
        hidden,
        head.weight,
        bias=head.bias,
        temperature=batch.temperature,
        softcap=config.softcap,
        logit_scale=config.logit_scale,
        vocab_size=config.vocab_size,
    )
    logprobs, _, _ = reference.token_statistics(z, batch.labels)
    total = torch.zeros((), dtype=torch.float64)
    for loss in config.losses.values():
        total = total + loss.weight * _reference_term(loss, logprobs, batch)
    return total


def _reference_term(loss: LossConfig, logprobs: Tensor, batch: BatchKwargs) -> Tensor:
    assert isinstance(loss, CrossEntropyLossConfig | GRPOLossConfig | GSPOLossConfig)
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    tokens = Tokens(
        labels=batch.labels,
        document_index=batch.document_index,
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs.double(),
        advantages=batch.advantages.double(),
    )
    return reference_losses.LOSSES[loss.type](tokens, loss.model_dump())


def pack(documents: Sequence[Document], pad_to_multiple: int = 1) -> BatchKwargs:
    """The one batch of all documents on one rank."""
    batch = TokenBatch.from_documents(
        documents, pad_to_multiple=pad_to_multiple, columns=("advantages", "old_logprobs")
    )
    (kwargs,) = batch.to_kwargs()
    return kwargs
