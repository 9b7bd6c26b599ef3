"""A step of documents with values and returns, and what stands beside the head, by plain loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import Document, LanguageModelHead, TokenBatch
from fastrl.config import DraftConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.reference import head as reference
from fastrl.functional.reference import heads as reference_heads
from fastrl.functional.reference import losses as reference_losses
from fastrl.functional.reference.tokens import Tokens
from fastrl.functional.statistics import TokenStatistics
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
    tokens = Tokens(batch.labels, batch.document_index, values * 0, group_index=batch.group_index)
    loss = reference_heads.value_loss(values, batch.values, batch.returns, tokens, options)
    weighted: Tensor = options["weight"] * loss
    return weighted


def draft_reference(
    head: LanguageModelHead,
    config: DraftConfig,
    batch: TokenBatch,
    hidden: list[Tensor],
) -> Tensor:
    """The draft heads' part of the loss, of all documents of a step; `hidden` by depth from 0."""
    assert head.bias is not None
    weight, bias = (
        each.detach() if config.detach_weight else each for each in (head.weight, head.bias)
    )
    total = hidden[0].new_zeros(())
    kwargs = batch.to_kwargs()[0]

    def logits(states: Tensor) -> Tensor:
        return reference.logits(
            states,
            weight,
            bias=bias,
            temperature=kwargs.temperature,
            softcap=head.config.softcap,
            vocab_size=head.config.vocab_size,
        )

    for depth in range(1, config.depth + 1):
        labels = reference_heads.draft_labels(kwargs.labels, kwargs.document_index, depth)
        z = logits(hidden[depth])
        statistics = TokenStatistics(*reference.token_statistics(z, labels))
        divergence = None
        if config.loss.type == "distillation":
            own = logits(hidden[0]).detach()
            divergence = z.new_zeros(len(labels))
            for t in [t for t in range(len(labels)) if labels[t] != -100]:
                target, drafted = own[t + depth].log_softmax(0), z[t].log_softmax(0)
                if config.loss.divergence == "reverse_kl":
                    target, drafted = drafted, target
                divergence[t] = (target.exp() * (target - drafted)).sum()
        tokens = Tokens(
            labels,
            kwargs.document_index,
            statistics.logprobs,
            logsumexp=statistics.logsumexp,
            mean_logit=z.mean(1),
            divergence=divergence,
            group_index=kwargs.group_index,
        )
        loss = reference_losses.LOSSES[config.loss.type](tokens, config.loss.model_dump())
        total = total + config.loss.weight / config.depth * loss
    return total
