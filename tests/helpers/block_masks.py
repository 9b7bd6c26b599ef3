"""FlexAttention's block masks, pair by pair."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fastrl.models.attention import FLEX_BLOCK_SIZE


def expand(blocks: Tensor, num_tokens: int) -> Tensor:
    """[T, T] from [blocks, blocks]."""
    pairs = blocks.repeat_interleave(FLEX_BLOCK_SIZE, 0).repeat_interleave(FLEX_BLOCK_SIZE, 1)
    return pairs[:num_tokens, :num_tokens]


def block_sets(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Partial and full blocks, each [blocks, blocks] bool."""
    sets = []
    for count, order in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert count is not None
        assert order is not None
        chosen = torch.zeros(order.shape[2:], dtype=torch.bool)
        for query, number in enumerate(count[0, 0].tolist()):
            chosen[query, order[0, 0, query, :number].long()] = True
        sets.append(chosen)
    return sets[0], sets[1]


def assert_block_mask(
    mask: BlockMask,
    expected: Tensor,  # [T, T]
) -> None:
    """Holds a mask to the pairs that are visible: no block too many, none too few."""
    num_tokens = len(expected)
    partial, full = block_sets(mask)
    row = torch.arange(num_tokens)
    zero = torch.zeros((), dtype=torch.int64)
    evaluated = mask.mask_mod(zero, zero, row[:, None], row[None, :])
    assert torch.equal(evaluated, expected)
    assert not (partial & full).any()
    assert expected[expand(full, num_tokens)].all()
    assert not expected[~expand(partial | full, num_tokens)].any()
    # Each block is needed, and those that need no evaluation are not evaluated.
    by_block = _by_block(expected)
    assert torch.equal(partial | full, by_block.any(3).any(1))
    assert not (partial & by_block.all(3).all(1)).any()


def _by_block(expected: Tensor) -> Tensor:
    """[blocks, FLEX_BLOCK_SIZE, blocks, FLEX_BLOCK_SIZE], nothing visible behind the end."""
    blocks = -(-len(expected) // FLEX_BLOCK_SIZE)
    padded = torch.zeros(2 * [blocks * FLEX_BLOCK_SIZE], dtype=torch.bool)
    padded[: len(expected), : len(expected)] = expected
    return padded.view(blocks, FLEX_BLOCK_SIZE, blocks, FLEX_BLOCK_SIZE)
