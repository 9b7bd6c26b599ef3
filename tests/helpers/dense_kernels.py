"""What `flash2` and `flash4` compute, by dense matrices in any dtype on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl.models.prefix_tree import Runs


def forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp [H, n]."""
    probabilities, scores = _softmax(query, key, runs)
    output = torch.einsum("hqk,khd->qhd", probabilities, _heads(value, query))
    return output.contiguous(), scores.logsumexp(-1)


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    runs: Runs,
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels do: probabilities from the log-sum-exp, and sums of output times its gradient."""
    _, scores = _softmax(query, key, runs)
    probabilities = (scores - logsumexp[:, :, None]).exp()
    dot = torch.einsum("qhd,qhd->hq", grad_output, output)
    by_probability = torch.einsum("qhd,khd->hqk", grad_output, _heads(value, query))
    by_score = probabilities * (by_probability - dot[:, :, None]) / math.sqrt(query.shape[-1])
    group = query.shape[1] // key.shape[1]
    grads = (
        torch.einsum("hqk,khd->qhd", by_score, _heads(key, query)),
        torch.einsum("hqk,qhd->khd", by_score, query).unflatten(1, (-1, group)).sum(2),
        torch.einsum("hqk,qhd->khd", probabilities, grad_output).unflatten(1, (-1, group)).sum(2),
    )
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


def sees(runs: Runs) -> Tensor:  # [n, m]
    """Which of a part's keys its queries see, from the bounds that kernels are given."""
    queries, keys = (starts.diff().long() for starts in (runs.query_starts, runs.key_starts))
    assert int(queries.max()) <= runs.longest_queries
    assert int(keys.max()) <= runs.longest_keys
    number = torch.arange(len(queries))
    of_query, of_key = number.repeat_interleave(queries), number.repeat_interleave(keys)
    same = of_query[:, None] == of_key[None, :]
    return same.tril() if runs.is_causal else same


def _softmax(query: Tensor, key: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("qhd,khd->hqk", query, _heads(key, query)) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~sees(runs), -math.inf)
    return scores.softmax(-1), scores


def _heads(shared: Tensor, query: Tensor) -> Tensor:
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)
