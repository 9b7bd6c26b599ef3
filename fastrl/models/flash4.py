"""FlashAttention 4 over runs of rows.

The flash-attn-4 package brings kernels for Hopper and Blackwell, compiled at their first call. What
is called here is what torch's `activate_flash_attention_impl("FA4")` calls too, which lacks this
case before torch 2.12.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastrl.models.prefix_tree import Runs


def refusal(device: torch.device) -> str | None:
    """What is needed and is not met on a GPU; None if it runs."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return f"needs a GPU of compute capability 9 or 10, got {major}.{minor}"
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "needs the flash-attn-4 package; install it with: pip install 'fastrl[flash4]'"
    return None


@cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def forward(
    query: Tensor,  # [n, H, head_dim]
    key: Tensor,  # [m, K, head_dim]
    value: Tensor,  # [m, K, head_dim]
    runs: Runs,
) -> tuple[Tensor, Tensor]:  # [n, H, head_dim] and [H, n]
    """Attention of each run of queries to its keys, and the fp32 log-sum-exp of the scores."""
    output, logsumexp, *_ = _interface()._flash_attn_fwd(
        query, key, value, return_lse=True, **_options(runs)
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
    grads: tuple[Tensor, Tensor, Tensor] = _interface()._flash_attn_bwd(
        query,
        key,
        value,
        output,
        grad_output,
        logsumexp,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_options(runs),
    )
    return grads


def _options(runs: Runs) -> dict[str, Any]:
    return {
        "cu_seqlens_q": runs.query_starts,
        "cu_seqlens_k": runs.key_starts,
        "max_seqlen_q": runs.longest_queries,
        "max_seqlen_k": runs.longest_keys,
        "causal": runs.is_causal,
    }
