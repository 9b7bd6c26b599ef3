"""Per-token statistics of the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor


@dataclass(frozen=True)
class TokenStatistics:
    """Per-token statistics of z = cap(logit_scale (h W^T + b)) / temperature, in nats.

    All but `is_argmax` are fp32 (float64 for float64 inputs); None where not requested.

    Attributes:
        logprobs: [T], z[label] - logsumexp(z); 0 at slots without label.
        entropy: [T], -sum p log p of p = softmax(z).
        logsumexp: [T], log sum exp z.
        mean_logit: [T], (1 / V) sum z.
        sum_squares: [T], sum p^2.
        is_argmax: [T] bool, whether no logit is above the label's; without gradient.
        divergence: [T], from a teacher's distribution (`teacher_divergence`).
        values: [T], of a value head; no statistic of z.
    """

    logprobs: Tensor  # [T]
    entropy: Tensor | None  # [T]
    logsumexp: Tensor  # [T]
    mean_logit: Tensor | None = None  # [T]
    sum_squares: Tensor | None = None  # [T]
    is_argmax: Tensor | None = None  # [T]
    divergence: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T]

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenStatistics:
        """The statistics with `function` applied to each vector."""
        values = ((name, getattr(self, name)) for name in _NAMES)
        return replace(
            self, **{name: function(value) for name, value in values if value is not None}
        )

    def vectors(self) -> list[Tensor]:
        """The vectors that are not None, in the order of the fields."""
        values = (getattr(self, name) for name in _NAMES)
        return [value for value in values if value is not None]


_NAMES = tuple(field.name for field in fields(TokenStatistics))
