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
from fastrl.data.packing import bundles_of, first_fit_decreasing, pack_documents, size_of
from fastrl.data.prefixes import Run, prefix_runs, single_runs
from fastrl.data.prompt_groups import group_numbers

Work = Callable[[Document, int], float]
"""The time of a document in any unit, such as its floating-point operations; without that of its
first tokens, so many of which the packed sequence shares with another document."""


def num_tokens(document: Document, num_shared: int) -> float:
    """The work of a document in tokens."""
    return float(len(document.tokens) - num_shared)


def micro_batches_of_rank(
    documents: Sequence[Document],
    rank: int,
    size: int,
    max_tokens: int,
    work: Work = num_tokens,
    *,
    share_prefixes: bool = False,
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
        share_prefixes: as in `pack_documents`.
    """
    if any(document.reward is not None for document in documents):
        documents = [
            replace(document, reward=nan) if document.reward is None else document
            for document in documents
        ]
    if size == 1:
        return pack_documents(documents, max_tokens, share_prefixes=share_prefixes)
    parts = balance_groups(documents, size, work, share_prefixes=share_prefixes)
    ranks = balance_micro_batches(parts, max_tokens, work, share_prefixes=share_prefixes)
    most = max(map(len, ranks))
    return ranks[rank] + [[_filler(documents[0])]] * (most - len(ranks[rank]))


def balance_groups(
    documents: Sequence[Document],
    parts: int,
    work: Work = num_tokens,
    *,
    share_prefixes: bool = False,
) -> list[list[Document]]:
    """Whole prompt groups in parts of about as much work each; documents keep their order.

    The group with the most work goes first, each to the part that has the least so far. A document
    without a group is one of its own.
    """
    if parts == 1:
        return [list(documents)]
    totals = [0.0] * parts
    part_of: dict[int, int] = {}
    groups = prefix_runs(documents) if share_prefixes else _whole_groups(documents)
    works = [_work_of(group, documents, work) for group in groups]
    for number in sorted(range(len(groups)), key=lambda number: -works[number]):
        part = totals.index(min(totals))
        part_of.update((run.number, part) for run in groups[number])
        totals[part] += works[number]
    dealt: list[list[Document]] = [[] for _ in range(parts)]
    for number, document in enumerate(documents):
        dealt[part_of[number]].append(document)
    return dealt


def balance_micro_batches(
    parts: Sequence[Sequence[Document]],
    max_tokens: int,
    work: Work = num_tokens,
    *,
    share_prefixes: bool = False,
) -> list[list[list[Document]]]:
    """The micro-batches of every rank, none empty, those with the most work first.

    As few as hold the documents of the rank with the most tokens, or a few more: packs that are
    full to the brim cannot have equal work, and a micro-batch more costs less than the wait for the
    slowest.

    Args:
        parts: the documents of each rank.
        max_tokens: of a micro-batch.
        work: of a document.
        share_prefixes: as in `pack_documents`.
    """
    bundles = [bundles_of(part, max_tokens, share_prefixes=share_prefixes) for part in parts]
    works = [
        [_work_of(bundle, part, work) for bundle in each]
        for part, each in zip(parts, bundles, strict=True)
    ]
    count = max(
        len(first_fit_decreasing([size_of(bundle) for bundle in each], max_tokens))
        for each in bundles
    )
    while True:
        ranks = [
            _packs_of_equal_work(*each, count, max_tokens)
            for each in zip(bundles, works, strict=True)
        ]
        found = [packs for packs in ranks if packs is not None]
        if len(found) == len(ranks):
            return [
                [[part[number] for number in numbers] for numbers in packs]
                for part, packs in zip(parts, found, strict=True)
            ]
        count += 1


def _packs_of_equal_work(
    bundles: Sequence[Sequence[Run]], works: Sequence[float], count: int, max_tokens: int
) -> list[list[int]] | None:
    """At most `count` packs of about as much work each; None where they have no room for that.

    The bundle with the most work goes first, each to the pack with the least so far that has room.

    Returns:
        The numbers of the documents of each pack, increasing.
    """
    totals, tokens = [0.0] * count, [0] * count
    packs: list[list[int]] = [[] for _ in range(count)]
    for number in sorted(range(len(bundles)), key=lambda number: -works[number]):
        length = size_of(bundles[number])
        fitting = [pack for pack in range(count) if tokens[pack] + length <= max_tokens]
        if not fitting:
            return None
        pack = min(fitting, key=totals.__getitem__)
        packs[pack] += [run.number for run in bundles[number]]
        totals[pack] += works[number]
        tokens[pack] += length
    order = sorted((pack for pack in range(count) if packs[pack]), key=lambda pack: -totals[pack])
    return [sorted(packs[pack]) for pack in order]


def _work_of(runs: Sequence[Run], documents: Sequence[Document], work: Work) -> float:
    return sum(work(documents[run.number], run.num_shared) for run in runs)


def _whole_groups(documents: Sequence[Document]) -> list[list[Run]]:
    """The documents of each group, which share nothing."""
    groups: dict[int, list[Run]] = {}
    numbers = group_numbers([document.group_id for document in documents])
    for number, (run,) in zip(numbers, single_runs(documents), strict=True):
        groups.setdefault(number, []).append(run)
    return list(groups.values())


def _filler(document: Document) -> Document:
    """The first token of a document, without label, with the fields that the document has."""
    none: dict[str, Any] = {name: [] for name in PER_TOKEN if getattr(document, name) is not None}
    first = document.tokens[:1]
    return replace(document, tokens=first, prompt_length=1, loss_mask=None, **none)
