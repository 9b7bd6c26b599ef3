"""Values of a document's labels in float64, from and to its fields."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastrl.data.checks import as_array, checked_tokens
from fastrl.data.documents import Document


def values_of_labels(number: int, document: Document, field: str) -> list[float]:
    """The values of a field at the labels, in order; a number is that of each label."""
    _, learned = checked_tokens(number, document)
    values = getattr(document, field)
    if np.ndim(values) == 0:
        return [float(values)] * int(learned.sum())
    array = as_array(number, field, values).astype(np.float64)
    result: list[float] = array[learned[len(learned) - len(array) :]].tolist()
    return result


def as_token_values(number: int, document: Document, values: Sequence[float]) -> list[float]:
    """Values of the labels as a field of the document, 0 at its other tokens.

    Python floats, which a batch keeps in the precision of the document's other numbers.
    """
    _, learned = checked_tokens(number, document)
    by_token = np.zeros(len(learned))
    by_token[learned] = values
    first = 0 if document.alignment == "token" else 1
    result: list[float] = by_token[first:].tolist()
    return result
