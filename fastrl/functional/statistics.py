"""What the head says of each token, and how it is put together from pieces of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
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


# Rows of the running statistics [4, R] of a part of the vocabulary.
MAX, SUM_EXP, SUM_SHIFTED, LABEL = range(4)


def new_running_statistics(num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[4, R] statistics of no columns: max m, s = sum e^(z-m), u = sum (z-m) e^(z-m), z[label].

    u is kept relative to the max, so that entropy = log s - u / s has no cancellation.
    """
    statistics = torch.zeros(4, num_rows, dtype=dtype, device=device)
    statistics[MAX].fill_(-torch.inf)
    statistics[LABEL].fill_(-torch.inf)
    return statistics


def merge_running_statistics(
    parts: Tensor,  # [N, 4, R]
) -> Tensor:  # [4, R]
    """Running statistics of the union of disjoint parts of the vocabulary."""
    maximum = parts[:, MAX].amax(0)
    shift = parts[:, MAX] - finite_or_zero(maximum)
    # Twice, since m may be a reference below the maximum: the scale alone could underflow.
    root = (shift * 0.5).exp()
    sum_exp = parts[:, SUM_EXP] * root * root
    # An empty part has shift -inf and sum 0: its product would be NaN.
    shifted = parts[:, SUM_SHIFTED] * root * root + torch.where(sum_exp > 0, shift * sum_exp, 0)
    return torch.stack([maximum, sum_exp.sum(0), shifted.sum(0), parts[:, LABEL].amax(0)])


def finish_statistics(statistics: Tensor, entropy: bool) -> TokenStatistics:  # [4, R]
    """Token statistics of running statistics that cover the whole vocabulary."""
    log_sum = statistics[SUM_EXP].log()
    return TokenStatistics(
        # Not label - logsumexp: two large numbers would lose the digits of log_sum.
        logprobs=(statistics[LABEL] - finite_or_zero(statistics[MAX])) - log_sum,
        entropy=log_sum - statistics[SUM_SHIFTED] / statistics[SUM_EXP] if entropy else None,
        logsumexp=statistics[MAX] + log_sum,
    )


def finite_or_zero(maximum: Tensor) -> Tensor:
    """`maximum` with -inf replaced by 0: the safe shift of a row without a finite logit."""
    return torch.where(maximum == -torch.inf, torch.zeros_like(maximum), maximum)
