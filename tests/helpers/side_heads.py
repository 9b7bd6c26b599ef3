"""A step of documents with values and returns, and what stands beside the head, by plain loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import Document
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.reference import heads as reference_heads
from fastrl.functional.reference import losses as reference_losses
from tests.helpers.loss_heads import HIDDEN_SIZE

# Prompts and completions: documents shorter than a depth, without label, of one token.
LENGTHS = ((2, 7), (1, 1), (3, 9), (1, 0), (4, 2), (6, 0), (2, 12), (1, 3))
VOCABULARY = 31


def step_documents(dtype: torch.dtype = torch.float64) -> list[Document]:
    """Documents of all columns that heads read; their values and returns differ by up to 1."""
    generator = torch.Generator().manual_seed(41)
    documents = []
    for number, (prompt, completion) in enumerate(LENGTHS):
        numbers = torch.randn(4, completion, generator=generator, dtype=dtype)
        documents.append(
            Document(
                torch.randint(VOCABULARY, (prompt + completion,), generator=generator),
                prompt_length=prompt,
                logprobs=numbers[0] * 0.3 - 3,
                advantage=numbers[1],
                values=numbers[2] * 0.5,
                returns=numbers[3],
                temperature=(0.7, 1.0)[number % 2],
                group_id=number // 2,
            )
        )
    return documents


def hidden_of(documents: list[Document], seed: int) -> list[Tensor]:
    """Hidden states [n, D] of each document, the same wherever it is packed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(len(document.tokens), HIDDEN_SIZE, generator=generator, dtype=torch.float64)
        for document in documents
    ]


def packed_hidden(parts: list[Tensor], length: int) -> Tensor:
    """[length, D]; padding has values that must have no say."""
    packed = torch.cat([torch.zeros(0, HIDDEN_SIZE, dtype=torch.float64), *parts])
    extra = max(length - len(packed), 0)
    return torch.cat([packed, torch.full((extra, HIDDEN_SIZE), 3.0).double()])


def value_reference(hidden: Tensor, weight: Tensor, batch: BatchKwargs, options: Any) -> Tensor:
    """The loss of a value head, of all documents of a step."""
    values = hidden @ weight[0]
    assert batch.values is not None
    assert batch.returns is not None
    tokens = reference_losses.Tokens(
        batch.labels, batch.document_index, values * 0, group_index=batch.group_index
    )
    loss = reference_heads.value_loss(values, batch.values, batch.returns, tokens, options)
    weighted: Tensor = options["weight"] * loss
    return weighted
