"""The one and only label shift of documents.

Here: `shift_documents`, which checks documents, joins them and moves every value of token i + 1 to
slot i, inside documents. Not here: padding, counts over ranks and slices (`batch.py`). Nothing
downstream shifts or rolls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fastrl.data.checks import (
    check_scalars,
    kept_lists,
    label_values,
    learned_tokens,
    token_ids,
)
from fastrl.data.columns import BATCH_COLUMNS, DOCUMENT_COLUMNS
from fastrl.data.documents import IGNORE_LABEL, Array, Document, DocumentError


@dataclass(frozen=True)
class ShiftedDocuments:
    """Joined documents in label alignment; T tokens, N documents, numpy arrays on the host."""

    tokens: Array  # [T] int64
    labels: Array  # [T] int64
    positions: Array  # [T] int64
    document_index: Array  # [T] int64
    columns: dict[str, Array]  # [T] fp32 each, 0 at slots without label
    lengths: Array  # [N] int64
    label_counts: Array  # [N] int64
    temperatures: Array  # [N] float64
    model_versions: Array | None  # [N] int64, -1 = none (documents without label only)
    rewards: Array | None  # [N] fp32, NaN = none
    kept_tokens: Array | None  # [T, K] int64, -1 fills up; K: the longest list


def shift_documents(
    documents: Sequence[Document], columns: Collection[str] | None = None
) -> ShiftedDocuments:
    """Joins documents and moves the values of token i + 1 to slot i, inside each document.

        labels[i] = tokens[i + 1] if i + 1 is in the document and to be learned, else -100

    Args:
        documents: checked here; any number, also none.
        columns: names out of `BATCH_COLUMNS` that the result must carry, no others. A document with
            labels that lacks one is refused. None: the columns that any document has.

    Raises:
        DocumentError: naming the document, the field, what is required and what was given.
    """
    ids = [token_ids(number, document) for number, document in enumerate(documents)]
    learned = [
        learned_tokens(number, document, len(ids[number]))
        for number, document in enumerate(documents)
    ]
    for number, document in enumerate(documents):
        check_scalars(number, document)
    lengths = np.array([len(each) for each in ids], dtype=np.int64)
    label_counts = np.array([each.sum() for each in learned], dtype=np.int64)
    carried = _carried_columns(documents, label_counts, columns)
    shifted = {
        name: [
            label_values(number, document, BATCH_COLUMNS[name], learned[number])
            for number, document in enumerate(documents)
        ]
        for name in carried
        if DOCUMENT_COLUMNS[BATCH_COLUMNS[name]].per_token
    }
    tokens = _joined(ids, np.int64)
    starts = np.cumsum(lengths) - lengths
    return ShiftedDocuments(
        tokens=tokens,
        labels=_shifted(np.where(_joined(learned, np.bool_), tokens, IGNORE_LABEL), IGNORE_LABEL),
        positions=np.arange(len(tokens)) - np.repeat(starts, lengths),
        document_index=np.repeat(np.arange(len(documents)), lengths),
        columns={name: _shifted(_joined(each, np.float32), 0) for name, each in shifted.items()},
        lengths=lengths,
        label_counts=label_counts,
        temperatures=np.array([document.temperature for document in documents], dtype=np.float64),
        model_versions=_model_versions(documents) if "model_version" in carried else None,
        rewards=_rewards(documents),
        kept_tokens=_kept_tokens(documents),
    )


def _joined(arrays: Sequence[Array], dtype: type) -> Array:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _shifted(by_token: Array, filler: int) -> Array:
    """Value i + 1 in slot i. Documents begin with `filler`, which thus ends the one before."""
    shifted = np.full_like(by_token, filler)
    shifted[:-1] = by_token[1:]
    return shifted


def _kept_tokens(documents: Sequence[Document]) -> Array | None:
    """[T, K] `kept_tokens` in label alignment, -1 fills up; None where no document has any."""
    if all(document.kept_tokens is None for document in documents):
        return None
    by_slot: list[Array] = []
    for number, document in enumerate(documents):
        by_slot += [*kept_lists(number, document)[1:], np.zeros(0, np.int64)]
    kept = np.full((len(by_slot), max(map(len, by_slot))), -1, dtype=np.int64)
    for slot, ids in enumerate(by_slot):
        kept[slot, : len(ids)] = ids
    return kept


def _carried_columns(
    documents: Sequence[Document], label_counts: Array, columns: Collection[str] | None
) -> list[str]:
    """Names of the columns of the batch; refuses a labelled document that lacks one."""
    if columns is not None and (unknown := sorted(set(columns) - set(BATCH_COLUMNS))):
        raise ValueError(f"`columns` must be names out of {list(BATCH_COLUMNS)}, got {unknown}")
    carried = []
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
        carried.append(name)
    return carried


def _model_versions(documents: Sequence[Document]) -> Array:
    versions = [document.model_version for document in documents]
    return np.array([-1 if version is None else version for version in versions], dtype=np.int64)


def _rewards(documents: Sequence[Document]) -> Array | None:
    rewards = [document.reward for document in documents]
    if all(reward is None for reward in rewards):
        return None
    return np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float32)
