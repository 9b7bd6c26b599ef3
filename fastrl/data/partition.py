"""Which process trains on which documents; every process computes it from all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

from fastrl.data.columns import PER_TOKEN
from fastrl.data.documents import Document
from fastrl.data.packing import pack_documents
from fastrl.data.prompt_groups import group_numbers


def micro_batches_of_rank(
    documents: Sequence[Document], rank: int, size: int, max_tokens: int
) -> list[list[Document]]:
    """The documents of each micro-batch of a data rank: as many on every rank.

    Collectives need the same micro-batches on all ranks, so a rank that has fewer documents gets
    fillers, which have no label and count nowhere. If any document is scored, all have a reward
    (NaN is none), as all ranks must compute the same metrics.

    Args:
        documents: of one update, at least one.
        rank: index in the data axis.
        size: of the data axis.
        max_tokens: of a micro-batch.
    """
    if any(document.reward is not None for document in documents):
        documents = [
            replace(document, reward=nan) if document.reward is None else document
            for document in documents
        ]
    packs = [pack_documents(part, max_tokens) for part in balance_by_tokens(documents, size)]
    most = max(map(len, packs))
    return packs[rank] + [[_filler(documents[0])]] * (most - len(packs[rank]))


def balance_by_tokens(documents: Sequence[Document], parts: int) -> list[list[Document]]:
    """Whole prompt groups in parts of about as many tokens each; documents keep their order.

    The longest group goes first, each to the part that has the fewest tokens so far. A document
    without a group is one of its own.
    """
    if parts == 1:
        return [list(documents)]
    numbers = group_numbers([document.group_id for document in documents])
    sizes: Counter[int] = Counter()
    for number, document in zip(numbers, documents, strict=True):
        sizes[number] += len(document.tokens)
    part_of: dict[int, int] = {}
    totals = [0] * parts
    for number, size in sizes.most_common():
        part = totals.index(min(totals))
        part_of[number] = part
        totals[part] += size
    dealt: list[list[Document]] = [[] for _ in range(parts)]
    for number, document in zip(numbers, documents, strict=True):
        dealt[part_of[number]].append(document)
    return dealt


def _filler(document: Document) -> Document:
    """The first token of a document, without label, with the fields that the document has."""
    none: dict[str, Any] = {name: [] for name in PER_TOKEN if getattr(document, name) is not None}
    first = document.tokens[:1]
    return replace(document, tokens=first, prompt_length=1, loss_mask=None, **none)
