"""FlashAttention 4 over documents of any lengths, as an operator that torch.compile keeps whole.

The flash-attn-4 package brings kernels for Hopper and Blackwell, compiled at their first call. Its
own autograd function would break the graph of each compiled layer; what it calls is what torch's
`activate_flash_attention_impl("FA4")` calls too, which lacks this case before torch 2.12.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


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


@torch.library.custom_op("fastrl::flash4_attention", mutates_args=())
def flash4_attention(
    query: Tensor,  # [T, H, head_dim]
    key: Tensor,  # [T, K, head_dim]
    value: Tensor,  # [T, K, head_dim]
    starts: Tensor,  # [N + 1]
    longest: int,
) -> tuple[Tensor, Tensor]:  # [T, H, head_dim] and [H, T]
    """Causal attention inside documents, and the fp32 log-sum-exp of each query's scores.

    Args:
        query: 16 bits, as key and value.
        key: K divides H; query heads that follow each other share one.
        value: of the keys.
        starts: int32, first row of each document, and T.
        longest: rows of the longest document, at least.
    """
    output, logsumexp, *_ = _interface()._flash_attn_fwd(
        query, key, value, causal=True, return_lse=True, **_bounds(starts, longest)
    )
    return output, logsumexp


@flash4_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    logsumexp = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return query.new_empty(query.shape), logsumexp


@torch.library.custom_op("fastrl::flash4_attention_backward", mutates_args=())
def flash4_attention_backward(
    grad_output: Tensor,  # [T, H, head_dim]
    query: Tensor,  # [T, H, head_dim]
    key: Tensor,  # [T, K, head_dim]
    value: Tensor,  # [T, K, head_dim]
    output: Tensor,  # [T, H, head_dim]
    logsumexp: Tensor,  # [H, T]
    starts: Tensor,  # [N + 1]
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `flash4_attention` by query, key and value."""
    grads: tuple[Tensor, Tensor, Tensor] = _interface()._flash_attn_bwd(
        query,
        key,
        value,
        output,
        grad_output,
        logsumexp,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_bounds(starts, longest),
    )
    return grads


@flash4_attention_backward.register_fake
def _(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    starts: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _bounds(starts: Tensor, longest: int) -> dict[str, Any]:
    """Queries and keys are of the same documents."""
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, ctx.longest = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, starts = ctx.saved_tensors
    grads = flash4_attention_backward(grad_output, *tensors, starts, ctx.longest)
    return *grads, None, None


flash4_attention.register_autograd(_backward, setup_context=_keep)
