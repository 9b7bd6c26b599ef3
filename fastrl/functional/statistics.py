"""What the head says of each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor


@dataclass(frozen=True)
class TokenStatistics:
    """Per-token statistics of z = cap(logit_scale (h W^T + b)) / temperature, in nats.

    Attributes:
        logprobs: [T], z[label] - logsumexp(z); 0 at slots without label.
        entropy: [T], -sum p log p of p = softmax(z), or None when it was not asked for.
        logsumexp: [T], log sum exp z.
        mean_logit: [T], (1 / V) sum z, or None when it was not asked for.
        sum_squares: [T], sum p^2, or None when it was not asked for.
        is_argmax: [T] bool, whether no logit is above the label's, or None when it was not asked
            for. It has no gradient.
        divergence: [T], from a teacher's distribution (`teacher_divergence`), or None.

    All but `is_argmax` are fp32 (float64 for float64 inputs).
    """

    logprobs: Tensor  # [T]
    entropy: Tensor | None  # [T]
    logsumexp: Tensor  # [T]
    mean_logit: Tensor | None = None  # [T]
    sum_squares: Tensor | None = None  # [T]
    is_argmax: Tensor | None = None  # [T]
    divergence: Tensor | None = None  # [T]

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenStatistics:
        """The statistics with `function` applied to each vector."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(
            self, **{name: function(value) for name, value in values if value is not None}
        )

    def vectors(self) -> list[Tensor]:
        """The vectors that are there, in the order of the fields."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value for value in values if value is not None]
