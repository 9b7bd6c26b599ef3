"""Running statistics [4, R] of a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels import can_run

MAX, SUM_EXP, SUM_SHIFTED, LABEL = range(4)


def new_running_statistics(num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[4, R] statistics of no columns: max m, s = sum e^(z-m), u = sum (z-m) e^(z-m), z[label].

    u is kept relative to the max, so that entropy = log s - u / s has no cancellation.
    """
    statistics = torch.zeros(4, num_rows, dtype=dtype, device=device)
    statistics[:: LABEL - MAX].fill_(-torch.inf)  # MAX and LABEL, in one launch
    return statistics


def merge_running_statistics(
    parts: Tensor,  # [N, 4, R]
) -> Tensor:  # [4, R]
    """Running statistics of the union of disjoint parts of the vocabulary."""
    maximum = parts[:, MAX].amax(0)
    shift = parts[:, MAX] - finite_or_zero(maximum)
    # Applied twice: m may be a reference below the maximum, whose scale alone could underflow.
    root = (shift * 0.5).exp()
    sum_exp = parts[:, SUM_EXP] * root * root
    # An empty part has shift -inf and sum 0: its product would be NaN.
    shifted = parts[:, SUM_SHIFTED] * root * root + torch.where(sum_exp > 0, shift * sum_exp, 0)
    return torch.stack([maximum, sum_exp.sum(0), shifted.sum(0), parts[:, LABEL].amax(0)])


def finish_statistics(
    statistics: Tensor,  # [4, R]
    entropy: bool,
    rows: Tensor | None = None,  # [R]
    num_tokens: int | None = None,
) -> TokenStatistics:
    """Token statistics of running statistics that cover the whole vocabulary.

    With `rows` those of `num_tokens` tokens, 0 at the others.
    """
    num_tokens = statistics.shape[1] if num_tokens is None else num_tokens
    if can_run(statistics):
        from fastrl.kernels.row_statistics import finish_row_statistics

        return TokenStatistics(
            *finish_row_statistics(statistics, rows, num_tokens, entropy=entropy)
        )
    log_sum = statistics[SUM_EXP].log()
    finished = TokenStatistics(
        # Not label - logsumexp: two large numbers would lose the digits of log_sum.
        logprobs=(statistics[LABEL] - finite_or_zero(statistics[MAX])) - log_sum,
        entropy=torch.addcdiv(log_sum, statistics[SUM_SHIFTED], statistics[SUM_EXP], value=-1)
        if entropy
        else None,
        logsumexp=statistics[MAX] + log_sum,
    )
    if rows is None:
        return finished
    places = rows
    return finished.map(lambda value: scatter_rows(value, places, num_tokens))


def scatter_rows(values: Tensor, rows: Tensor, num_tokens: int) -> Tensor:
    """[..., T] with `values` [..., R] at `rows` and 0 elsewhere."""
    if values.shape[-1] == num_tokens:
        return values
    return values.new_zeros(*values.shape[:-1], num_tokens).index_copy_(-1, rows, values)


def finite_or_zero(maximum: Tensor) -> Tensor:
    """`maximum` with -inf replaced by 0: the safe shift of a row without a finite logit."""
    return maximum.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0)
