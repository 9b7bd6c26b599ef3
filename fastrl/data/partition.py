"""Which process trains on which documents, in which micro-batch; every process computes it all.

Micro-batch k of all data ranks runs at a time where their collectives meet (FSDP2 gathers the
weights of each layer), and lasts as long as the rank with the most work. So each rank is given
about as much work, each of its micro-batches too, and the micro-batches are in order of their work.
Losses are sums divided by counts of the step: who computes a document changes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from typing import Any

from fastrl.data.columns import PER_TOKEN
from fastrl.data.documents import Document
from fastrl.data.packing import pack_documents
from fastrl.data.prompt_groups import group_numbers

Work = Callable[[Document], float]
"""The time of a document in any unit, such as its floating-point operations."""


def num_tokens(document: Document) -> float:
    """The work of a document in tokens."""
    return float(len(document.tokens))


def micro_batches_of_rank(
    documents: Sequence[Document],
    rank: int,
    size: int,
    max_tokens: int,
    work: Work = num_tokens,
) -> list[list[Document]]:
    """The documents of each micro-batch of a data rank: as many on every rank, of equal work.

    Collectives need the same micro-batches on all ranks, so a rank that has fewer documents gets
    fillers, which have no label and count nowhere. If any document is scored, all have a reward
    (NaN is none), as all ranks must compute the same metrics.

    Args:
        documents: of one update, at least one.
        rank: index in the data axis.
        size: of the data axis.
        max_tokens: of a micro-batch.
        work: of a document.
    """
    if any(document.reward is not None for document in documents):
        documents = [
            replace(document, reward=nan) if document.reward is None else document
            for document in documents
        ]
    if size == 1:
        return pack_documents(documents, max_tokens)
    ranks = balance_micro_batches(balance_groups(documents, size, work), max_tokens, work)
    most = max(map(len, ranks))
    return ranks[rank] + [[_filler(documents[0])]] * (most - len(ranks[rank]))


def balance_groups(
    documents: Sequence[Document], parts: int, work: Work = num_tokens
) -> list[list[Document]]:
    """Whole prompt groups in parts of about as much work each; documents keep their order.

    The group with the most work goes first, each to the part that has the least so far. A document
    without a group is one of its own.
    """
    if parts == 1:
        return [list(documents)]
    numbers = group_numbers([document.group_id for document in documents])
    of_group: dict[int, float] = {}
    for number, document in zip(numbers, documents, strict=True):
        of_group[number] = of_group.get(number, 0.0) + work(document)
    part_of: dict[int, int] = {}
    totals = [0.0] * parts
    for number, amount in sorted(of_group.items(), key=lambda item: -item[1]):
        part = totals.index(min(totals))
        part_of[number] = part
        totals[part] += amount
    dealt: list[list[Document]] = [[] for _ in range(parts)]
    for number, document in zip(numbers, documents, strict=True):
        dealt[part_of[number]].append(document)
    return dealt


def balance_micro_batches(
    parts: Sequence[Sequence[Document]], max_tokens: int, work: Work = num_tokens
) -> list[list[list[Document]]]:
    """The micro-batches of every rank, none empty, those with the most work first.

    As few as hold the documents of the rank with the most tokens, or a few more: packs that are
    full to the brim cannot have equal work, and a micro-batch more costs less than the wait for the
    slowest.

    Args:
        parts: the documents of each rank.
        max_tokens: of a micro-batch.
        work: of a document.
    """
    count = max(len(pack_documents(part, max_tokens)) for part in parts)
    while True:
        ranks = [_packs_of_equal_work(part, count, max_tokens, work) for part in parts]
        found = [packs for packs in ranks if packs is not None]
        if len(found) == len(ranks):
            return found
        count += 1


def _packs_of_equal_work(
    documents: Sequence[Document], count: int, max_tokens: int, work: Work
) -> list[list[Document]] | None:
    """At most `count` packs of about as much work each; None where they have no room for that.

    The document with the most work goes first, each to the pack with the least so far that has
    room. Documents keep their order inside a pack.
    """
    works = [work(document) for document in documents]
    totals, tokens = [0.0] * count, [0] * count
    packs: list[list[int]] = [[] for _ in range(count)]
    for number in sorted(range(len(documents)), key=lambda number: -works[number]):
        length = len(documents[number].tokens)
        fitting = [pack for pack in range(count) if tokens[pack] + length <= max_tokens]
        if not fitting:
            return None
        pack = min(fitting, key=totals.__getitem__)
        packs[pack].append(number)
        totals[pack] += works[number]
        tokens[pack] += length
    order = sorted((pack for pack in range(count) if packs[pack]), key=lambda pack: -totals[pack])
    return [[documents[number] for number in sorted(packs[pack])] for pack in order]


def _filler(document: Document) -> Document:
    """The first token of a document, without label, with the fields that the document has."""
    none: dict[str, Any] = {name: [] for name in PER_TOKEN if getattr(document, name) is not None}
    first = document.tokens[:1]
    return replace(document, tokens=first, prompt_length=1, loss_mask=None, **none)
