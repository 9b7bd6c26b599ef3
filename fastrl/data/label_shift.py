"""The one and only label shift of documents.

Here: `shift_documents`, which checks documents, joins them and moves every value of token i + 1 to
slot i, inside documents, and `further_slots`, by which the labels of draft heads move on. Not here:
padding, counts over ranks and slices (`batch.py`). Nothing downstream shifts or rolls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl.data.checks import checked_tokens, float_dtype, id_lists, label_values, teacher_lists
from fastrl.data.columns import BATCH_COLUMNS, DOCUMENT_COLUMNS
from fastrl.data.documents import IGNORE_LABEL, Array, Document, DocumentError
from fastrl.functional.kept_tokens import KeptTokens


def shift_documents(
    documents: Sequence[Document], columns: Collection[str] | None = None
) -> dict[str, Any]:
    """Joins documents and moves the values of token i + 1 to slot i, inside each document.

        labels[i] = tokens[i + 1] if i + 1 is in the document and to be learned, else -100

    Args:
        documents: checked here; any number, also none.
        columns: names out of `BATCH_COLUMNS` that the result must carry, no others. A document with
            labels that lacks one is refused. Rewards are carried too then, NaN where there is none,
            and groups where no document has a label. None: the columns that any document has.

    Returns:
        The fields of a `TokenBatch` without padding.

    Raises:
        DocumentError: naming the document, the field, what is required and what was given.
    """
    checked = [checked_tokens(number, document) for number, document in enumerate(documents)]
    lengths = np.array([len(ids) for ids, _ in checked], dtype=np.int64)
    label_counts = [int(learned.sum()) for _, learned in checked]
    carried = _carried_columns(documents, label_counts, columns)
    by_token = {
        name: [
            label_values(number, document, field, checked[number][1])
            for number, document in enumerate(documents)
        ]
        for name, field in carried.items()
        if DOCUMENT_COLUMNS[field].per_token
    }
    # A float64 document makes all columns of its batch float64; the values of others are fp32.
    joined = {name: _joined(values, np.float32) for name, values in by_token.items()}
    is_float64 = any(values.dtype == np.float64 for values in joined.values())
    tokens = _joined([ids for ids, _ in checked], np.int64)
    is_label = _joined([learned for _, learned in checked], np.bool_)
    index = np.repeat(np.arange(len(documents)), lengths)
    starts = np.cumsum(lengths) - lengths
    temperatures = [float(document.temperature) for document in documents]
    group_ids = tuple(document.group_id for document in documents)
    is_unlabelled = columns is not None and not any(label_counts)
    has_groups = is_unlabelled or any(group is not None for group in group_ids)
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": _shifted(np.where(is_label, tokens, IGNORE_LABEL), IGNORE_LABEL),
        "positions": torch.from_numpy(np.arange(len(tokens)) - starts[index]),
        "document_index": torch.from_numpy(index),
        "columns": {name: _shifted(values, 0) for name, values in joined.items()},
        "document_lengths": tuple(lengths.tolist()),
        "document_label_counts": torch.tensor(label_counts, dtype=torch.int64),
        "temperatures": torch.tensor(temperatures, dtype=torch.float64),
        "model_versions": _model_versions(documents) if "model_version" in carried else None,
        "rewards": _rewards(
            documents,
            torch.float64 if is_float64 else torch.float32,
            carries_always=columns is not None,
        ),
        "group_ids": group_ids if has_groups else None,
        **_recorded(documents, checked),
    }


def further_slots(
    document_index: Tensor,  # [T]
    depth: int,
) -> tuple[Tensor, Tensor]:  # [T], [T]
    """For each slot the one `depth` places further on, and whether it is in the same document.

    Where it is not, the slot itself. Padding is no document.
    """
    slots = torch.arange(len(document_index))
    later = slots + depth
    inside = later < len(slots)
    later = torch.where(inside, later, slots)
    inside &= (document_index >= 0) & (document_index[later] == document_index)
    return torch.where(inside, later, slots), inside


def _joined(arrays: Sequence[Array], dtype: type) -> Array:  # [T]
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _shifted(
    by_token: Array,  # [T]
    filler: int,
) -> Tensor:  # [T]
    """Value i + 1 in slot i. Documents begin with `filler`, which thus ends the one before."""
    shifted = np.full_like(by_token, filler)
    shifted[:-1] = by_token[1:]
    return torch.from_numpy(shifted)


def _recorded(
    documents: Sequence[Document], checked: Sequence[tuple[Array, Array]]
) -> dict[str, KeptTokens | None]:
    """The recorded entries of a batch, by their fields."""
    return {
        "kept_tokens": _kept_tokens(documents, checked),
        "teacher_tokens": _teacher_tokens(documents, checked),
    }


def _kept_tokens(
    documents: Sequence[Document], checked: Sequence[tuple[Array, Array]]
) -> KeptTokens | None:
    """`kept_tokens` in label alignment; None where no document has any.

    A document without them has no entry at any label, one with them has some at each.
    """
    if all(document.kept_tokens is None for document in documents):
        return None
    lists = [
        id_lists(number, document, "kept_tokens", checked[number][1])
        for number, document in enumerate(documents)
    ]
    return _entries(lists, None)


def _teacher_tokens(
    documents: Sequence[Document], checked: Sequence[tuple[Array, Array]]
) -> KeptTokens | None:
    """`teacher_ids` with their log-probabilities likewise."""
    given = ((document.teacher_ids, document.teacher_logprobs) for document in documents)
    if all(ids is None and logprobs is None for ids, logprobs in given):
        return None
    pairs = [
        teacher_lists(number, document, checked[number][1])
        for number, document in enumerate(documents)
    ]
    _have("teacher_ids", documents, checked)
    return _entries([ids for ids, _ in pairs], [logprobs for _, logprobs in pairs])


def _have(
    field: str, documents: Sequence[Document], checked: Sequence[tuple[Array, Array]]
) -> bool:
    """Whether the documents have the field; refuses a labelled one that alone lacks it."""
    present = [getattr(document, field) is not None for document in documents]
    if not any(present):
        return False
    for number, is_present in enumerate(present):
        if not is_present and checked[number][1].any():
            reason = f"is required, as document {present.index(True)} has it, got none"
            raise DocumentError(number, field, reason)
    return True


def _entries(
    ids: Sequence[Sequence[Array]], logprobs: Sequence[Sequence[Array]] | None
) -> KeptTokens:
    """The lists of each document's tokens, those of token i + 1 in slot i."""
    by_slot = _lists_shifted(ids, np.int64)
    counts = np.array([len(each) for each in by_slot], dtype=np.int64)
    values = None if logprobs is None else _joined(_lists_shifted(logprobs, np.float32), np.float32)
    return KeptTokens.from_counts(
        torch.from_numpy(_joined(by_slot, np.int64)),
        torch.from_numpy(counts),
        None if values is None else torch.from_numpy(values),
    )


def _lists_shifted(lists: Sequence[Sequence[Array]], dtype: type) -> list[Array]:
    return [each for of_one in lists for each in (*of_one[1:], np.zeros(0, dtype))]


def _carried_columns(
    documents: Sequence[Document], label_counts: Sequence[int], columns: Collection[str] | None
) -> dict[str, str]:
    """The columns of the batch and their fields; refuses a labelled document that lacks one."""
    if columns is not None and (unknown := sorted(set(columns) - set(BATCH_COLUMNS))):
        raise ValueError(f"`columns` must be names out of {list(BATCH_COLUMNS)}, got {unknown}")
    carried = {}
    for name, field in BATCH_COLUMNS.items():
        present = [getattr(document, field) is not None for document in documents]
        if name not in columns if columns is not None else not any(present):
            continue
        for number, is_present in enumerate(present):
            if not is_present and label_counts[number] > 0:
                reason = (
                    f"document {present.index(True)} has it"
                    if columns is None
                    else f"the batch must carry `{name}`"
                )
                raise DocumentError(number, field, f"is required, as {reason}, got none")
        carried[name] = field
    return carried


def _model_versions(documents: Sequence[Document]) -> Tensor:
    versions = [document.model_version for document in documents]
    numbers = [-1 if version is None else int(version) for version in versions]
    return torch.tensor(numbers, dtype=torch.int64)


def _rewards(
    documents: Sequence[Document], dtype: torch.dtype, *, carries_always: bool
) -> Tensor | None:
    rewards = [document.reward for document in documents]
    if not carries_always and all(reward is None for reward in rewards):
        return None
    numbers = [
        nan if document.reward is None else float(float_dtype(document)(document.reward))
        for document in documents
    ]
    return torch.tensor(numbers, dtype=dtype)
