"""Prompt groups of documents: the answers to one prompt, and their labels over a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

from fastrl.data.documents import Document

GroupId: TypeAlias = int | str


def group_numbers(group_ids: Sequence[GroupId | None]) -> list[int]:
    """A 0-based number for each document's group, in order; no id is a group of its own."""
    numbers: dict[object, int] = {}
    keys = [object() if group is None else group for group in group_ids]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def group_by_prompt(documents: Sequence[Document]) -> list[list[Document]]:
    """The documents of each prompt group, groups and documents in order; see `group_numbers`."""
    groups: dict[int, list[Document]] = {}
    numbers = group_numbers([document.group_id for document in documents])
    for number, document in zip(numbers, documents, strict=True):
        groups.setdefault(number, []).append(document)
    return list(groups.values())


def count_group_labels(
    batches: Iterable[tuple[Sequence[GroupId | None], Sequence[int]]],
) -> tuple[Mapping[Hashable, int], int]:
    """Labels of each group by its id (if it has one), and how many groups have any.

    Args:
        batches: of a step on one data rank: (group id, number of labels) of each document.
    """
    labels: Counter[Hashable] = Counter()
    for group_ids, counts in batches:
        for group, count in zip(group_ids, counts, strict=True):
            labels[object() if group is None else group] += count
    return labels, sum(count > 0 for count in labels.values())


def document_group_labels(
    group_ids: Sequence[GroupId | None], counts: Sequence[int], labels: Mapping[Hashable, int]
) -> list[int]:
    """Labels of each document's whole group.

    Args:
        group_ids: of the documents.
        counts: labels of the documents.
        labels: of each group by its id, from `count_group_labels`.
    """
    return [
        count if group is None else labels[group]
        for group, count in zip(group_ids, counts, strict=True)
    ]
