"""Attention of a packed sequence in which documents share the slots of their common prefix.

    slot q sees slot k    <=>    k <= q < visible_until[k]

The slots are a forest in depth-first order: `visible_until[k]` is the end of what descends from
slot k. What a slot sees is the path from its root to itself, the tokens of its document up to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fastrl.config.model import WHOLE_DOCUMENTS, AttentionImplementation
from fastrl.models.attend import DocumentLengths, LayerAttention
from fastrl.models.attention import (
    FLEX_BLOCK_SIZE,
    DocumentGroups,
    FlexDocumentAttention,
    PerDocumentAttention,
    packed_block_mask,
    similar_lengths,
    uses_flex,
)
from fastrl.models.prefix_tree import PrefixTree
from fastrl.models.tree_attention import TreeAttention
from fastrl.models.varlen import check_varlen


def prefix_attention(
    visible_until: Tensor,  # [T]
    *,
    implementation: AttentionImplementation,
    head_dim: int,
    dtype: torch.dtype,
    lengths: DocumentLengths | None = None,
) -> LayerAttention:
    """Causal attention inside documents that share slots.

    Args:
        visible_until: int64, of `BatchKwargs`.
        implementation: as `LlamaConfig.attention_implementation`.
        head_dim: size of one head.
        dtype: of query, key and value.
        lengths: known on the host, with its `visible_until`, for `varlen` and `flash4`, which
            otherwise wait for the device once.

    Raises:
        ValueError: the implementation does not run here.
    """
    if implementation in WHOLE_DOCUMENTS:
        check_varlen(implementation, visible_until.device, dtype)
        until = None if lengths is None else lengths.visible_until
        until = visible_until.cpu() if until is None else until
        return TreeAttention(PrefixTree.of(until, visible_until.device), implementation)
    if uses_flex(implementation, visible_until.device, head_dim, dtype):
        return FlexDocumentAttention(prefix_block_mask(visible_until))
    groups: DocumentGroups = path_groups(visible_until)
    return PerDocumentAttention(groups)


def prefix_block_mask(
    visible_until: Tensor,  # [T]
) -> BlockMask:
    """FlexAttention's mask, block by block: no [T, T] pairs, no host synchronisation.

    Among blocks of queries and of earlier keys, a block of pairs is needed if the first query sees
    a key, which is then the key that is seen for longest, and full if the last query sees all.
    """
    num_tokens, device = len(visible_until), visible_until.device
    missing = visible_until.new_zeros(-num_tokens % FLEX_BLOCK_SIZE)
    blocks = torch.cat([visible_until, missing]).view(-1, FLEX_BLOCK_SIZE)
    latest, earliest = blocks.amax(1), blocks.amin(1)  # the last block is never full
    first_query = torch.arange(0, num_tokens, FLEX_BLOCK_SIZE, device=device)
    last_query = (first_query + FLEX_BLOCK_SIZE - 1).clamp(max=num_tokens - 1)
    earlier = first_query[None, :] < first_query[:, None]
    needed = latest[None, :] > first_query[:, None]
    needed &= earlier | torch.eye(len(blocks), dtype=torch.bool, device=device)
    full = earlier & (earliest[None, :] > last_query[:, None])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        sees: Tensor = (key <= query) & (query < visible_until[key])
        return sees

    return packed_block_mask(needed, full, visible, (num_tokens, num_tokens))


# On the host, where lengths decide shapes: nothing to compile.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def path_groups(
    visible_until: Tensor,  # [T]
) -> DocumentGroups:
    """Documents as rows of `PerDocumentAttention`: the paths from roots to leaves.

    A shared slot is a row of every path through it; its own output is taken from the first.
    """
    device = visible_until.device
    until = visible_until.cpu()
    num_tokens = len(until)
    slot = torch.arange(num_tokens, device="cpu")
    num_ended = torch.bincount(until, minlength=num_tokens + 1).cumsum(0)[:num_tokens]
    depth = slot - num_ended
    # In depth-first order the ancestor at depth d is the last slot so far of that depth.
    by_depth = (depth * num_tokens + slot).sort().values
    leaves = slot[until == slot + 1]
    lengths = depth[leaves] + 1
    group = similar_lengths(lengths)
    first_row = torch.empty_like(leaves)
    rows = []
    num_rows = 0
    for number in group.unique().tolist():
        chosen = group == number
        leaf, length = leaves[chosen, None], lengths[chosen, None]
        offset = torch.arange(int(length.max()), device="cpu").minimum(length - 1)
        place = torch.searchsorted(by_depth, offset * num_tokens + leaf, right=True) - 1
        members = by_depth[place] % num_tokens
        first_row[chosen] = num_rows + torch.arange(len(leaf), device="cpu") * members.shape[1]
        num_rows += members.numel()
        rows.append(members.to(device))
    slots = first_row[torch.searchsorted(leaves, slot)] + depth
    return DocumentGroups(tuple(rows), slots.to(device))
