"""Log-probabilities over the keep-set of a sampler: top-k, top-p, min-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.full_rows import LogitRows, full_rows
from fastrl.functional.quantiles import ordered_keys, upper_threshold
from fastrl.functional.statistics import TokenStatistics


@dataclass(frozen=True)
class KeepSet:
    """Which entries of the vocabulary a token was sampled from; the label is always one of them.

    Attributes:
        top_k: the k most probable entries, ties of the last included.
        top_p: the smallest set of the most probable entries left by `top_k` that holds at least
            top_p of their probability, ties of the last included.
        min_p: entries at least min_p times as probable as the most probable one.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def masked_logprobs(
    call: HeadCall,
    keep: KeepSet,
    *,
    gradient_rows: Tensor | None = None,  # [G]
) -> TokenStatistics:
    """Statistics of the labels under softmax over the keep-set K of each token.

        logprob = z[label] - log sum_{v in K} e^{z_v}

    The set is a constant: no gradient flows through its choice, and entries outside it receive
    none. It is found from the current logits by a threshold search on counts (top-k) or masses
    (top-p), whose histograms are summed over the vocabulary's ranks; temperature is applied first,
    then top-k, top-p, min-p, the order of Hugging Face's generation. `gradient_rows` as in
    `full_rows`.
    """

    def statistics(rows: LogitRows) -> Tensor:
        with torch.no_grad():
            kept = kept_columns(rows, keep) | rows.label_mask()
        # -inf has probability 0 and no gradient; in the product 0 replaces it.
        inside = torch.where(kept, rows.z, -torch.inf)
        logsumexp = rows.logsumexp(inside)
        p = (inside - rows.to_columns(logsumexp)).exp()
        safe = torch.where(inside > -torch.inf, rows.z, 0)
        entropy = logsumexp - rows.sum(p * safe)
        return torch.stack([rows.label_logits() - logsumexp, entropy, logsumexp])

    outputs = full_rows(call, statistics, 3, gradient_rows=gradient_rows)
    return TokenStatistics(*outputs.unbind())


def kept_columns(rows: LogitRows, keep: KeepSet) -> Tensor:  # [R, S]
    """Which of this rank's columns are in the keep-set, labels aside; without gradient."""
    z, groups = rows.z.detach(), [rows.group]
    kept = z > -torch.inf
    keys = ordered_keys(z)
    if keep.top_k is not None:
        most = keep.top_k
        threshold = upper_threshold(z, kept.long(), lambda total: total.clamp(max=most), groups)
        kept = kept & (keys >= threshold[:, None])
    if keep.top_p is not None:
        share = keep.top_p
        logsumexp = rows.logsumexp(torch.where(kept, z, -torch.inf))
        mass = torch.where(kept, (z - logsumexp[:, None]).exp(), 0)
        threshold = upper_threshold(z, mass, lambda total: total * share, groups)
        kept = kept & (keys >= threshold[:, None])
    if keep.min_p is not None:
        kept = kept & (z >= (rows.maximum(z) + math.log(keep.min_p))[:, None])
    return kept
