"""A fixed binary tree over blocks of columns of the whole vocabulary, for any number of ranks.

Leaf i holds the part [3, R] (reference m, s = sum e^(z-m), u = sum (z-m) e^(z-m)) of the columns
[256 i, 256 (i + 1)). A rank merges its leaves to complete subtrees; their roots, at most about
2 log2 of its blocks, travel, and every rank merges them further, as one rank would its leaves.
An absent part changes no bit of what it is merged with, so a tree may have any number of leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fastrl.functional.head.running import finite_or_zero
from fastrl.kernels import can_run
from fastrl.kernels.arguments import MOST_PARTS, PART_COLUMNS, ceil_div, next_power_of_2
from fastrl.parallel import vocab_shard


@dataclass(frozen=True)
class MergeTree:
    """The tree over `weight_rows` rows of the whole weight, sharded by `vocab_shard`.

    Attributes:
        weight_rows: of the whole weight, padding included.
        size: ranks that share the vocabulary.
    """

    weight_rows: int
    size: int = 1

    def check_shards(self) -> None:
        """Refuses a split of a leaf between ranks.

        Raises:
            ValueError: with the number of rows that splits none.
        """
        shards = [vocab_shard(self.weight_rows, rank, self.size) for rank in range(self.size)]
        if any(start % PART_COLUMNS and start < self.weight_rows for start, _ in shards):
            step = PART_COLUMNS * self.size
            padded = ceil_div(self.weight_rows, step) * step
            raise ValueError(
                "`deterministic` must be False where a rank's rows of the weight begin inside of a"
                f" block of {PART_COLUMNS}, got {self.weight_rows} rows over {self.size} ranks; pad"
                f" the weight to {padded} rows (`padded_vocab_size`)."
            )

    def subtrees(self, rank: int) -> list[tuple[int, int]]:
        """First and one-past-last leaf of each complete subtree of a rank, in order."""
        start, stop = vocab_shard(self.weight_rows, rank, self.size)
        first, last = ceil_div(start, PART_COLUMNS), ceil_div(stop, PART_COLUMNS)
        found: list[tuple[int, int]] = []
        while first < last:
            size = min(first & -first or MOST_PARTS, MOST_PARTS)
            while first + size > last:
                size //= 2
            found.append((first, first + size))
            first += size
        return found

    @property
    def num_roots(self) -> int:
        """The most subtrees of a rank; a single one merges all of its tree itself."""
        if self.size == 1:
            return 1
        return max(len(self.subtrees(rank)) for rank in range(self.size))

    def local_roots(self, leaves: Tensor, first_column: int, entropy: bool) -> Tensor:
        """Roots [num_roots, 3, R] of the subtrees of a rank, of its leaves [L, 3, R]."""
        if self.size == 1:
            for slots in _whole_slots(self, leaves.device):
                leaves = _merge(leaves, slots, entropy)
            return leaves
        _, shard = vocab_shard(self.weight_rows, 0, self.size)
        return _merge(leaves, _local_slots(self, first_column // shard, leaves.device), entropy)

    def whole(self, roots: Tensor, entropy: bool) -> Tensor:
        """The root [3, R] of the tree, of the roots [size num_roots, 3, R] of all ranks."""
        if self.size == 1:
            return roots[0]
        for slots in _whole_slots(self, roots.device):
            roots = _merge(roots, slots, entropy)
        return roots[0]


@lru_cache
def _local_slots(tree: MergeTree, rank: int, device: torch.device) -> Tensor:  # [num_roots, W]
    found = tree.subtrees(rank)
    subtrees = [range(start - found[0][0], stop - found[0][0]) for start, stop in found]
    subtrees += [range(0)] * (tree.num_roots - len(subtrees))
    return _table([list(leaves) for leaves in subtrees], device)


@lru_cache
def _whole_slots(tree: MergeTree, device: torch.device) -> list[Tensor]:
    """The roots at their first leaves, MOST_PARTS leaves a node; then those nodes."""
    num_leaves = ceil_div(tree.weight_rows, PART_COLUMNS)
    places = list(range(num_leaves))
    if tree.size > 1:
        places = [-1] * num_leaves
        for rank in range(tree.size):
            for number, (start, _) in enumerate(tree.subtrees(rank)):
                places[start] = rank * tree.num_roots + number
    tables: list[Tensor] = []
    while not tables or len(tables[-1]) > 1:
        nodes = [places[i : i + MOST_PARTS] for i in range(0, len(places), MOST_PARTS)]
        tables.append(_table(nodes, device))
        places = list(range(len(nodes)))
    return tables


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    """[G, W] int32, W a power of two, -1 where a row has no more entries."""
    width = next_power_of_2(max(len(row) for row in rows))
    padded = [row + [-1] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32).to(device)


def _merge(parts: Tensor, slots: Tensor, entropy: bool) -> Tensor:  # [N, 3, R] -> [G, 3, R]
    if can_run(parts):
        from fastrl.kernels.merge import merge_nodes

        return merge_nodes(parts, slots, entropy=entropy)
    absent = parts.new_zeros(1, *parts.shape[1:])
    absent[:, 0] = -torch.inf
    leaves = torch.cat([absent, parts])[(slots + 1).long()]  # [G, W, 3, R]
    while leaves.shape[1] > 1:
        leaves = _merged(leaves[:, 0::2], leaves[:, 1::2])
    return leaves[:, 0]


def _merged(left: Tensor, right: Tensor) -> Tensor:  # [..., 3, R]
    """Parts of the columns of both."""
    maximum = torch.maximum(left[..., 0, :], right[..., 0, :])
    shift = finite_or_zero(maximum)
    sums: list[Tensor] = []
    for part in (left, right):
        of_part = part[..., 0, :] - shift
        scale = of_part.exp()
        sum_exp = part[..., 1, :] * scale
        # An absent part has shift -inf: its product would be NaN.
        moved = torch.where(sum_exp > 0, of_part * sum_exp, 0)
        sums += [sum_exp, part[..., 2, :] * scale + moved]
    return torch.stack([maximum, sums[0] + sums[2], sums[1] + sums[3]], dim=-2)
