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


def group_over_files(files: Iterable[Sequence[Document]]) -> list[list[Document]]:
    """The documents of each prompt group of several files, groups and documents in order.

    An id in two files is one group where its prompts are equal, as in the files of the workers of
    one sampling, and two groups otherwise, as in files that count their groups from 0 each.
    """
    groups: dict[object, list[Document]] = {}
    for documents in files:
        for group in group_by_prompt(documents):
            # A mask may begin behind the prompt; the earliest is the nearest to its end.
            prompt = min(map(_before_labels, group), key=len)
            group_id = group[0].group_id
            groups.setdefault(object() if group_id is None else (group_id, prompt), []).extend(
                group
            )
    return list(groups.values())


def _before_labels(document: Document) -> tuple[int, ...]:
    """The tokens before the first that is to be learned."""
    if document.prompt_length is not None:
        return tuple(document.tokens[: document.prompt_length])
    assert document.loss_mask is not None
    return tuple(document.tokens[: [*map(bool, document.loss_mask), True].index(True)])


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
