"""Attention over packed documents by FlashAttention's kernels, shared prefixes among them.

    o_q = softmax_k(q k^T / sqrt(head_dim)) v      over the keys k that q sees

The parts of `PrefixTree` are calls of a kernel, whose results are merged by their log-sum-exps l_i:

    l = log sum_i e^(l_i),  o = sum_i e^(l_i - l) o_i

A kernel's backward needs of its forward only output and log-sum-exp. With those of the whole the
gradients of the parts add up to those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.models import flash2, flash4
from fastrl.models.attend import StatelessAttention
from fastrl.models.prefix_tree import PrefixTree, runs_of


@dataclass(frozen=True, eq=False)
class TreeAttention(StatelessAttention):
    """One operator, which torch.compile keeps whole, for trees of any depth.

    Attributes:
        tree: of the packed sequence.
        kernel: `varlen` or `flash4`.
    """

    tree: PrefixTree
    kernel: str

    def __call__(
        self,
        query: Tensor,  # [T, H, head_dim]
        key: Tensor,  # [T, K, head_dim]
        value: Tensor,  # [T, K, head_dim]
    ) -> Tensor:  # [T, H, head_dim]
        tree = self.tree
        output: Tensor
        output, _ = tree_attention(
            query, key, value, tree.starts, tree.rows, tree.sizes, self.kernel
        )
        return output


@torch.library.custom_op("fastrl::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor,  # [T, H, head_dim]
    key: Tensor,  # [T, K, head_dim]
    value: Tensor,  # [T, K, head_dim]
    starts: Tensor,
    rows: Tensor,
    sizes: Tensor,
    kernel: str,
) -> tuple[Tensor, Tensor]:  # [T, H, head_dim] and [H, T]
    """The attention of a `PrefixTree`, and the log-sum-exp of each query's scores.

    Args:
        query: 16 bits, as key and value.
        key: K divides H; query heads that follow each other share one.
        value: of the keys.
        starts: of the tree, as are the next two.
        rows: of each part.
        sizes: of each part.
        kernel: `varlen` or `flash4`.

    Returns:
        The output, and the fp32 log-sum-exp.
    """
    if len(query) == 0:  # kernels have no empty launch
        return _new_results(query)
    forward = _kernels(kernel).forward
    nodes, *others = runs_of(starts, rows, sizes)
    output, logsumexp = forward(query, key, value, nodes)
    if not others:
        return output, logsumexp
    total = output.to(logsumexp.dtype)
    for runs in others:
        part, own = forward(query[runs.queries], key[runs.keys], value[runs.keys], runs)
        before = logsumexp[:, runs.queries]
        after = torch.logaddexp(before, own)
        merged = total[runs.queries] * _weights(before, after)
        total[runs.queries] = merged.add_(part * _weights(own, after))
        logsumexp[:, runs.queries] = after
    return total.to(query.dtype), logsumexp


@tree_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    rows: Tensor,
    sizes: Tensor,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    return _new_results(query)


@torch.library.custom_op("fastrl::tree_attention_backward", mutates_args=())
def tree_attention_backward(
    grad_output: Tensor,  # [T, H, head_dim]
    query: Tensor,  # [T, H, head_dim]
    key: Tensor,  # [T, K, head_dim]
    value: Tensor,  # [T, K, head_dim]
    output: Tensor,  # [T, H, head_dim]
    logsumexp: Tensor,  # [H, T]
    starts: Tensor,
    rows: Tensor,
    sizes: Tensor,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `tree_attention` by query, key and value."""
    if len(query) == 0:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    backward = _kernels(kernel).backward
    nodes, *others = runs_of(starts, rows, sizes)
    grads: tuple[Tensor, Tensor, Tensor] = backward(
        grad_output, query, key, value, output, logsumexp, nodes
    )
    if not others:
        return grads
    # A node's keys are in one part beside its own, whose sum is rounded once in any dtype.
    grad_query, (_, grad_key, grad_value) = grads[0].to(logsumexp.dtype), grads
    for runs in others:
        queries, keys = runs.queries, runs.keys
        parts = backward(
            grad_output[queries],
            query[queries],
            key[keys],
            value[keys],
            output[queries],
            logsumexp[:, queries].contiguous(),
            runs,
        )
        grad_query[queries] += parts[0]
        grad_key[keys] += parts[1]
        grad_value[keys] += parts[2]
    return grad_query.to(query.dtype), grad_key, grad_value


@tree_attention_backward.register_fake
def _(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    starts: Tensor,
    rows: Tensor,
    sizes: Tensor,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _new_results(
    query: Tensor,  # [T, H, head_dim]
) -> tuple[Tensor, Tensor]:  # [T, H, head_dim] and [H, T]
    dtype = torch.promote_types(query.dtype, torch.float32)
    logsumexp = query.new_empty((query.shape[1], query.shape[0]), dtype=dtype)
    return query.new_empty(query.shape), logsumexp


def _kernels(name: str) -> Any:
    """The module whose `forward` and `backward` compute the attention of runs."""
    return flash4 if name == "flash4" else flash2


def _weights(
    part: Tensor,  # [H, n]
    whole: Tensor,  # [H, n]
) -> Tensor:  # [n, H, 1]
    return (part - whole).exp().t()[..., None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # those of the log-sum-exp
    query, key, value, *tree, ctx.kernel = inputs
    ctx.save_for_backward(query, key, value, *output, *tree)


def _backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    grads = tree_attention_backward(grad_output, *ctx.saved_tensors, ctx.kernel)
    return *grads, None, None, None, None


tree_attention.register_autograd(_backward, setup_context=_keep)
