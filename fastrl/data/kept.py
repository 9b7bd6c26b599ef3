"""The entries of the vocabulary that a sampler drew each token from, in label alignment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastrl.data.documents import Array, Document, DocumentError, Integers, as_array


def shifted_kept_tokens(documents: Sequence[Document]) -> Array | None:
    """[T, K] int64: `kept_tokens` of token i + 1 in slot i, inside each document; -1 fills up.

    K is the longest list of all. None where no document has any.

    Args:
        documents: that `shift_documents` accepts.

    Raises:
        DocumentError: naming the document, the field, what is required and what was given.
    """
    if all(document.kept_tokens is None for document in documents):
        return None
    by_token: list[Array] = []
    for number, document in enumerate(documents):
        entries = _entries(number, document)
        by_token += [*entries[1:], np.zeros(0, np.int64)]  # nothing follows the last token
    width = max((len(ids) for ids in by_token), default=0)
    kept = np.full((len(by_token), width), -1, dtype=np.int64)
    for slot, ids in enumerate(by_token):
        kept[slot, : len(ids)] = ids
    return kept


def _entries(number: int, document: Document) -> list[Array]:
    """[n] lists of entries in token alignment, empty where none are given."""
    length = len(document.tokens)
    given: Sequence[Integers] = () if document.kept_tokens is None else document.kept_tokens
    allowed = {length: "token"} if document.alignment == "token" else {length - 1: "label"}
    if document.prompt_length is not None:
        allowed.setdefault(length - document.prompt_length, "completion token")
    if document.kept_tokens is not None and len(given) not in allowed:
        choices = " or ".join(f"{count} (one a {what})" for count, what in allowed.items())
        problem = f"must have {choices} lists, got {len(given)}; none are padded or cut"
        raise DocumentError(number, "kept_tokens", problem)
    entries = [np.zeros(0, np.int64)] * (length - len(given))
    for values in given:
        array = as_array(number, "kept_tokens", values)
        if len(array) and (array.dtype.kind not in "iu" or array.min() < 0):
            raise DocumentError(number, "kept_tokens", "must hold ids of at least 0 alone")
        entries.append(array.astype(np.int64))
    return entries
