"""A record of the collectives that a rank issues, in forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _resolve_process_group,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collective(NamedTuple):
    """One call: what it does, between which ranks, and how much of what.

    `num_elements` are those of the whole tensor: the result of an all-gather, else the input.
    """

    name: str
    ranks: tuple[int, ...]
    num_elements: int
    dtype: str


class CollectiveRecord(TorchDispatchMode):
    """Lists the collectives of this thread while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_helper = any(word in func.name() for word in ("wait", "wrap"))
        if func.namespace in ("c10d", "_c10d_functional") and not is_helper:
            leaves = tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            name = _NAMES[func.name().split("::")[1].split(".")[0]]
            ranks = _ranks(leaves)
            num_elements = max(tensor.numel() for tensor in tensors)
            if name == "all_gather" and func.namespace == "_c10d_functional":
                num_elements *= len(ranks)  # it has the input only
            self.calls.append(Collective(name, ranks, num_elements, str(tensors[0].dtype)))
        return func(*args, **(kwargs or {}))


# One name for the ops of c10d and for the functional ones, which DTensor uses.
_NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}


def _ranks(leaves: list[Any]) -> tuple[int, ...]:
    for leaf in leaves:
        if isinstance(leaf, str) and leaf not in ("sum", "avg", "max", "min"):
            group = _resolve_process_group(leaf)  # type: ignore[arg-type]
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
    raise AssertionError("a collective without process group")


def assert_same_order(calls: list[list[Collective]]) -> None:
    """Every group's collectives are the same, in the same order, on all its ranks."""
    groups = {call.ranks for rank_calls in calls for call in rank_calls}
    for group in groups:
        of_ranks = [[call for call in calls[rank] if call.ranks == group] for rank in group]
        for rank, mine in zip(group, of_ranks, strict=True):
            assert mine == of_ranks[0], (
                f"group {group}: rank {rank} issued {mine}, rank {group[0]} {of_ranks[0]}"
            )
