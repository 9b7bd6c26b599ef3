"""Tokens that documents of one prompt group begin with, once in a packed sequence.

Slot k of a document holds token k and the label of token k + 1. What comes before a slot decides
its hidden state, so documents with the same tokens 0 to k can share slot k, if none of them has a
label at it or before it:

    shared with the document before: the longest common prefix of both, up to their first label

The documents of a group are sorted by these prefixes. Each then adds a run of slots behind those
that it shares with the one before, which is the tree of prefixes in depth-first order: a slot comes
before the slots that see it, and these are adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fastrl.data.checks import unlabelled_prefix
from fastrl.data.documents import IGNORE_LABEL, Array, Document
from fastrl.data.prompt_groups import group_numbers
from fastrl.functional.batch import ENTRIES


@dataclass(frozen=True)
class Run:
    """What a document adds to a packed sequence: its tokens behind the shared ones.

    Attributes:
        number: of the document.
        num_shared: leading tokens that stand in the sequence already.
        num_tokens: tokens that the document adds.
    """

    number: int
    num_shared: int
    num_tokens: int


def prefix_runs(documents: Sequence[Document]) -> list[list[Run]]:
    """The runs of each prompt group, depth first; groups in order.

    Raises:
        DocumentError: tokens or labels of a document in a group of several cannot be read.
    """
    numbers = group_numbers([document.group_id for document in documents])

    def prefix(number: int) -> Array:
        return unlabelled_prefix(number, documents[number])

    return _runs(numbers, [len(document.tokens) for document in documents], prefix)


def single_runs(documents: Sequence[Document]) -> list[list[Run]]:
    """Each document by itself, sharing nothing."""
    return [[Run(number, 0, len(each.tokens))] for number, each in enumerate(documents)]


def bundled_runs(documents: Sequence[Document], max_tokens: int) -> list[list[Run]]:
    """The runs of each prompt group in bundles of at most `max_tokens` tokens, depth first.

    A group that is larger is split; what its parts share then stands in each of them.

    Args:
        documents: of at most `max_tokens` tokens each.
        max_tokens: of a bundle.
    """
    bundles = []
    for group in prefix_runs(documents):
        room = -1
        for run in group:
            if run.num_tokens > room:
                run = Run(run.number, 0, run.num_shared + run.num_tokens)
                bundles.append([run])
                room = max_tokens
            else:
                bundles[-1].append(run)
            room -= run.num_tokens
    return bundles


def check_not_split(sequence_data: int, micro_sequences: int) -> None:
    """Refuses to split a sequence in which documents share slots.

    Args:
        sequence_data: ranks that it is split over.
        micro_sequences: pieces that it is run in.
    """
    over = "sequence-data ranks" if sequence_data > 1 else "micro-sequences"
    if sequence_data > 1 or micro_sequences > 1:
        raise ValueError(
            f"`share_prefixes` must not be given where packed sequences are split over {over}: the"
            " keys that a token sees of a tree of documents are several intervals, and split"
            " attention takes one; leave it out, or split over tensor and data ranks"
        )


def with_shared_prefixes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `TokenBatch` without padding, common prefixes of its groups once.

    Args:
        fields: of `shift_documents`.

    Returns:
        The same with `visible_until` and `paths`, if documents share anything; else `fields`.
    """
    lengths = fields["document_lengths"]
    bounds = np.cumsum([0, *lengths])
    tokens, labels = fields["tokens"].numpy(), fields["labels"].numpy()

    def prefix(number: int) -> Array:
        start, end = bounds[number : number + 2]
        labelled = labels[start:end] != IGNORE_LABEL
        ids: Array = tokens[start : start + labelled.argmax() if labelled.any() else end]
        return ids

    numbers = group_numbers(fields["group_ids"] or (None,) * len(lengths))
    runs = [run for group in _runs(numbers, lengths, prefix) for run in group]
    if all(run.num_shared == 0 for run in runs):
        return dict(fields)
    chosen = torch.from_numpy(
        np.concatenate(
            [np.arange(bounds[run.number] + run.num_shared, bounds[run.number + 1]) for run in runs]
        )
    )
    names = ("tokens", "labels", "positions", "document_index", *ENTRIES)
    vectors = {name: fields[name] for name in names if fields[name] is not None}
    visible_until, paths = _tree(runs)
    return {
        **fields,
        **{name: vector[chosen] for name, vector in vectors.items()},
        "columns": {name: column[chosen] for name, column in fields["columns"].items()},
        "visible_until": torch.from_numpy(visible_until),
        "paths": tuple(torch.from_numpy(path) for path in paths),
    }


def _runs(
    numbers: Sequence[int], lengths: Sequence[int], prefix: Callable[[int], Array]
) -> list[list[Run]]:
    """The runs of each group.

    Args:
        numbers: of each document's group.
        lengths: of the documents.
        prefix: of the document of a number: the ids [m] of the slots that may be shared.
    """
    groups: dict[int, list[int]] = {}
    for document, number in enumerate(numbers):
        groups.setdefault(number, []).append(document)
    result = []
    for members in groups.values():
        if len(members) == 1:
            result.append([Run(members[0], 0, lengths[members[0]])])
            continue
        prefixes = {number: prefix(number) for number in members}
        # By their bytes: whatever the order of two ids, equal prefixes come next to one another.
        order = sorted(members, key=lambda number: prefixes[number].tobytes())
        shared = [0, *(_common(prefixes[a], prefixes[b]) for a, b in pairwise(order))]
        result.append(
            [Run(number, n, lengths[number] - n) for number, n in zip(order, shared, strict=True)]
        )
    return result


def _common(first: Array, second: Array) -> int:
    """The length of the longest common prefix."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def _tree(runs: Sequence[Run]) -> tuple[Array, list[Array]]:
    """The end of what sees each slot [T], and the slots [n] of each document by its number."""
    num_slots = sum(run.num_tokens for run in runs)
    visible_until = np.empty(num_slots, np.int64)
    paths = [np.empty(0, np.int64)] * len(runs)
    path = np.empty(0, np.int64)
    start = 0
    for run in runs:
        visible_until[path[run.num_shared :]] = start
        end = start + run.num_tokens
        path = paths[run.number] = np.append(path[: run.num_shared], np.arange(start, end))
        start = end
    visible_until[path] = num_slots
    return visible_until, paths
