"""What the groups of a preference loss must be: pairs of a chosen and a rejected document."""

from __future__ import annotations

from torch import Tensor

from fastrl.functional.value_checks import require_all

# Of the sum of 1 / n over a document's n labels, which is 1.
_ROUNDING = 1e-5


def check_pairs(chosen: Tensor, documents: Tensor) -> None:  # [num_groups + 1] each
    """Refuses groups of other than one chosen and one rejected document; empty ones are allowed."""
    is_pair = ((chosen - 1).abs() < _ROUNDING) & ((documents - 2).abs() < _ROUNDING)
    valid = is_pair | (documents == 0)
    message = (
        "`group_index` must be of pairs for the DPOLoss, two documents with labels in the packed"
        " sequence, one of them with `advantages` above 0"
    )

    def found() -> str:
        return (
            f", got {int((~valid).sum())} that are not; pack whole pairs"
            " (`fastrl.data.preferences`)."
        )

    require_all(valid, message, found)
