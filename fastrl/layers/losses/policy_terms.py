"""The terms of a policy-gradient loss, from log-probabilities and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from fastrl.layers.losses.masks import masked


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of surrogates, penalties and metrics; all [T], neutral at slots without label.

    Attributes:
        mask: slots with a label.
        logprobs: of the labels, 0 without.
        log_ratios: logprob - old_logprob of each token; 0 for a loss without ratio.
        ratio: at the loss's level, 1 for a loss without ratio.
        advantages: of the token; the document's mean with `ratio_level` `document`.
        token_advantages: of the token itself.
        weights: detached product of all weights and masks; None is 1.
        kl: the penalty of each token, coefficient included; None without.
        kept_entropy: entropy of the tokens that the bonus acts on; None without a bonus.
        corrections: the detached factor of each correction, by its option.
        whole_mask: `mask` where it is known to hold everywhere, which spares its use; else None.
    """

    mask: Tensor
    logprobs: Tensor
    log_ratios: Tensor
    ratio: Tensor
    advantages: Tensor
    token_advantages: Tensor
    weights: Tensor | None
    kl: Tensor | None
    kept_entropy: Tensor | None
    corrections: Mapping[str, Tensor] = field(default_factory=dict)
    whole_mask: Tensor | None = None

    def detached(self) -> PolicyTerms:
        """The terms without their graph."""
        values = {x.name: getattr(self, x.name) for x in fields(self)}
        graph: dict[str, Any] = {
            name: x.detach() for name, x in values.items() if isinstance(x, Tensor)
        }
        return replace(self, **graph)


def weighted(values: Tensor, terms: PolicyTerms) -> Tensor:  # [T]
    """`values` of a surrogate times the weights, 0 at dropped tokens, plus the KL penalty."""
    # Selected, not multiplied by 0: a dropped token may have any value.
    if terms.weights is not None:
        values = masked(values * terms.weights, terms.mask & (terms.weights != 0))
    elif terms.mask is not terms.whole_mask:
        values = masked(values, terms.mask)
    return values if terms.kl is None else values + terms.kl
