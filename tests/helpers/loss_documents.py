"""The documents that the cases of `loss_cases.py` are computed on, and their batches."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fastrl import BatchKwargs, Document, TokenBatch, TokenStatistics
from fastrl.functional.reference.tokens import Tokens

VOCAB_SIZE = 29
CURRENT_VERSION = 7
UNLIKELY = 7  # document that the policy has moved away from


def policy_documents() -> list[Document]:
    """Ordinary, one-label, prompt-only, masked, zero-advantage and far off-policy documents."""
    generator = torch.Generator().manual_seed(5)

    def normal(size: int, std: float, mean: float = 0.0) -> list[float]:
        draws = mean + std * torch.randn(size, generator=generator, dtype=torch.float64)
        return draws.float().tolist()

    def document(
        length: int, prompt_length: int, advantage: float, group: str, shift: float = 0.0
    ) -> Document:
        old = normal(length, 0.5, -3.2)
        return Document(
            tokens=torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist(),
            prompt_length=prompt_length,
            logprobs=[x + shift for x in old],
            ref_logprobs=[x + e for x, e in zip(old, normal(length, 0.4), strict=True)],
            rollout_logprobs=[x + e for x, e in zip(old, normal(length, 0.1), strict=True)],
            advantage=advantage,
            model_version=CURRENT_VERSION - length % 5,
            reward=advantage + 0.25,
            group_id=group,
        )

    masked = replace(
        document(8, 0, 0.0, "b"),
        prompt_length=None,
        loss_mask=[False, True, True, False, False, True, False, True],
        advantage=[0.0, 0.5, -1.5, 9.0, 9.0, 0.0, 9.0, 2.0],
    )
    return [
        document(7, 2, 0.5, "a"),
        document(5, 4, -1.0, "a"),
        document(3, 3, 1.0, "a"),
        document(9, 1, 0.0, "b"),
        document(1, 0, 1.0, "c"),
        masked,
        document(6, 3, 2.0, "c", shift=-40.0),
        document(4, 1, -0.7, "c"),
        document(2, 1, 1.3, "d"),
        document(8, 2, -0.6, "d"),
    ]


def with_weights(documents: list[Document]) -> list[Document]:
    """The documents in all streams: some as a whole, some by token, some not at all."""
    generator = torch.Generator().manual_seed(41)
    choices = torch.tensor([0.0, 0.5, 1.0, 2.0])

    def weight(number: int, document: Document) -> Any:
        drawn = choices[torch.randint(4, (len(document.tokens),), generator=generator)].tolist()
        return drawn if number % 3 else drawn[0]

    names = ("rl_weight", "ce_weight", "distill_weight")
    return [
        replace(x, **{name: weight(n + i, x) for i, name in enumerate(names)})
        for n, x in enumerate(documents)
    ]


def with_recorded_teacher(documents: list[Document]) -> list[Document]:
    """The documents with a teacher's entries: few, most of its mass, all of it, the vocabulary."""
    generator = torch.Generator().manual_seed(43)

    def entries(position: int) -> tuple[list[int], list[float]]:
        size = (1, 3, 6, VOCAB_SIZE)[position % 4]
        ids = torch.randperm(VOCAB_SIZE, generator=generator)[:size].tolist()
        draws = torch.randn(size, generator=generator, dtype=torch.float64)
        mass = (0.4, 0.9, 1 - 1e-9, 1.0)[position % 4]
        return ids, (draws.log_softmax(0) + math.log(mass)).tolist()

    result = []
    for document in documents:
        pairs = [entries(position) for position in range(len(document.tokens))]
        ids, logprobs = [ids for ids, _ in pairs], [logprobs for _, logprobs in pairs]
        result.append(replace(document, teacher_ids=ids, teacher_logprobs=logprobs))
    return result


def preference_documents() -> list[Document]:
    """Pairs of a chosen and a rejected document, in any order, one pair apart."""
    documents = [x for x in policy_documents() if x.prompt_length is not None]
    usable = [x for x in documents if len(x.tokens) > max(x.prompt_length or 0, 1)][:6]
    pairs = ("p", "q", "p", "r", "r", "q")
    signs = (1.0, -1.0, -1.0, 1.0, -1.0, 1.0)
    return [
        replace(x, group_id=pair, advantage=sign)
        for x, pair, sign in zip(usable, pairs, signs, strict=True)
    ]


def pack(documents: list[Document], pad_to_multiple: int = 8) -> BatchKwargs:
    """The one batch of all documents on one rank, in float64."""
    (batch,) = TokenBatch.from_documents(documents, pad_to_multiple=pad_to_multiple).to_kwargs()
    return widen(batch)


def widen(batch: BatchKwargs) -> BatchKwargs:
    """The batch with float64 columns, in which exactness is tested."""
    changes = {
        name: value.double()
        for name in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
        if (value := getattr(batch, name)) is not None
    }
    return batch.replace(current_version=CURRENT_VERSION, **changes)


def random_statistics(batch: BatchKwargs) -> TokenStatistics:
    """Statistics near the old policy, as leaves that require grad; garbage without label."""
    generator = torch.Generator().manual_seed(17)

    def normal(std: float) -> Tensor:
        return std * torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)

    assert batch.old_logprobs is not None
    # One document has become likely, one unlikely, beyond where ratios saturate.
    centre = batch.old_logprobs.clamp(-5, -1)
    centre = torch.where(batch.document_index == UNLIKELY, -30.0, centre)
    garbage = torch.where(batch.labels == -100, 1e3, 0.0)
    vectors = {
        "logprobs": (centre + normal(0.3)).clamp(max=-0.01),
        "entropy": normal(0.8).abs() + 0.1,
        "logsumexp": normal(1.0) + 3,
        "mean_logit": normal(0.5),
        "divergence": normal(0.5).abs(),
    }
    return TokenStatistics(
        **{name: (value + garbage).requires_grad_() for name, value in vectors.items()}
    )


def reference_tokens(statistics: TokenStatistics, batch: BatchKwargs) -> Tokens:
    """The same for the definition."""
    names = {field.name for field in fields(Tokens)}
    values = {
        name: getattr(source, name)
        for source in (batch, statistics)
        for name in names
        if hasattr(source, name)
    }
    return Tokens(**values)
