"""FlashAttention 2 over runs of rows: the kernels of torch's `varlen_attn`, with their log-sum-exp.

`varlen_attn` itself gives no gradient from another log-sum-exp than its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.models.prefix_tree import Runs


def forward(
    query: Tensor,  # [n, H, head_dim]
    key: Tensor,  # [m, K, head_dim]
    value: Tensor,  # [m, K, head_dim]
    runs: Runs,
) -> tuple[Tensor, Tensor]:  # [n, H, head_dim] and [H, n]
    """Attention of each run of queries to its keys, and the fp32 log-sum-exp of the scores."""
    output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query.contiguous(), key, value, *_bounds(runs), 0.0, runs.is_causal, False
    )
    return output, logsumexp


def backward(
    grad_output: Tensor,  # [n, H, head_dim]
    query: Tensor,  # [n, H, head_dim]
    key: Tensor,  # [m, K, head_dim]
    value: Tensor,  # [m, K, head_dim]
    output: Tensor,  # [n, H, head_dim]
    logsumexp: Tensor,  # [H, n]
    runs: Runs,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `forward` by query, key and value."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_output,
        query,
        key,
        value,
        output,
        logsumexp,
        *_bounds(runs),
        0.0,
        runs.is_causal,
        *no_dropout,
    )
    return grads


def _bounds(runs: Runs) -> tuple[Tensor, Tensor, int, int]:
    return runs.query_starts, runs.key_starts, runs.longest_queries, runs.longest_keys
