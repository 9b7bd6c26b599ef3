"""Layouts of ranks: what the operator and the model matrix run on."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.data.slices import Layout
from fastrl.parallel import ParallelGroups
from tests.helpers.ranks import parallel_groups


@dataclass(frozen=True)
class Ranks:
    """Sizes of the axes, and how the head and the sequence are laid out over them."""

    data: int = 1
    sequence_data: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    vocabulary_parallel: bool = True
    layout: Layout = "contiguous"

    @property
    def world_size(self) -> int:
        return self.data * self.sequence_data * self.tensor

    @property
    def head_splits_tokens(self) -> bool:
        """Whether the tensor ranks hold different tokens in the head."""
        return self.sequence_parallel and not self.vocabulary_parallel

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Indices in the data, sequence-data and tensor axes."""
        rest, tensor = divmod(rank, self.tensor)
        return *divmod(rest, self.sequence_data), tensor

    def groups(self) -> ParallelGroups:
        """This rank's groups; on a rank of the pool only."""
        return parallel_groups(self.data, self.sequence_data, self.tensor, self.sequence_parallel)

    def __str__(self) -> str:
        names = [
            f"dp{self.data}" * (self.data > 1),
            f"sdp{self.sequence_data}" * (self.sequence_data > 1),
            "zigzag" * (self.layout == "zigzag"),
            f"tp{self.tensor}" * (self.tensor > 1),
            "sp" * self.sequence_parallel,
            "novp" * (not self.vocabulary_parallel),
        ]
        return "_".join(name for name in names if name) or "one_rank"


def variants(data: int, sequence_data: int, tensor: int) -> list[Ranks]:
    """All layouts of these sizes: sequence and vocabulary parallel or not, both slicings."""
    layouts: tuple[Layout, ...] = ("contiguous", "zigzag") if sequence_data > 1 else ("contiguous",)
    switches = [(False, True), (True, True), (False, False), (True, False)]
    return [
        Ranks(data, sequence_data, tensor, sp, vp, layout)
        for sp, vp in (switches if tensor > 1 else switches[:1])
        for layout in layouts
    ]


TWO_RANKS = [*variants(2, 1, 1), *variants(1, 2, 1), *variants(1, 1, 2)]
FOUR_RANKS = [
    *variants(1, 1, 4),
    *variants(1, 4, 1),
    *variants(1, 2, 2),
    *variants(2, 1, 2),
    *variants(2, 2, 1),
]
EIGHT_RANKS = [
    Ranks(2, 2, 2, True, True, "zigzag"),
    Ranks(2, 2, 2, True, False, "contiguous"),
    Ranks(1, 2, 4, False, True, "zigzag"),
    Ranks(2, 4, 1, False, True, "zigzag"),
]
