"""Matrix products over the rows of a case: those of the floors, and those that heads execute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from benchmarks.cases import Case

# All tokens, those with a label, those with gradient.
Rows = Literal["all", "labelled", "active"]


@dataclass(frozen=True)
class Products:
    """Products over the same rows.

    Attributes:
        rows: which.
        kinds: `f` h W^T, `h` dz W, `w` dz^T h; each letter is one product.
    """

    rows: Rows
    kinds: str


def number_of_rows(case: Case, rows: Rows) -> int:
    """How many rows of a case are meant."""
    return {
        "all": case.shape.num_tokens,
        "labelled": len(case.labelled),
        "active": len(case.active),
    }[rows]


def operations(case: Case, products: Iterable[Products]) -> int:
    """Floating-point operations: 2 R D V a product over R rows."""
    rows = sum(number_of_rows(case, each.rows) * len(each.kinds) for each in products)
    return 2 * rows * case.shape.hidden_size * case.shape.vocab_size
