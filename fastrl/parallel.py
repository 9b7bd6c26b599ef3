"""Process groups and the differentiable collectives that the head and the losses use.

Every group is an explicit argument; `None` is one rank. The default process group is never read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

AXES = ("data", "sequence_data", "tensor")

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def device_mesh(
    *, data: int = 1, sequence_data: int = 1, tensor: int = 1, device_type: str
) -> DeviceMesh:
    """The mesh of all ranks with the axes `data`, `sequence_data`, `tensor`, the last innermost.

    Ranks of one tensor group are thus neighbours, on one host where it has enough devices. This
    is the one place that reads the default process group, which must be initialised.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks; on every rank and before any
            collective.
    """
    sizes = (data, sequence_data, tensor)
    needed, found = math.prod(sizes), dist.get_world_size()
    if min(sizes) < 1 or needed != found:
        raise ValueError(
            f"`parallel` must have sizes that multiply to the number of ranks, {found}, got data"
            f" {data} x sequence_data {sequence_data} x tensor {tensor} = {needed}; start"
            f" {needed} processes or change the sizes."
        )
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of one rank; `None` stands for an axis of size one.

    Attributes:
        tp: tensor axis. The head's weight is sharded by vocabulary rows over it (`vocab_shard`).
        sp: Megatron sequence parallelism: the tensor axis once more, when hidden states are split
            along the sequence between its ranks.
        sdp: sequence-data axis (context parallel): ranks hold pieces of the same packed sequence.
        dp: data axis: ranks hold different documents.
    """

    tp: ProcessGroup | None = None
    sp: ProcessGroup | None = None
    sdp: ProcessGroup | None = None
    dp: ProcessGroup | None = None

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> ParallelGroups:
        """The groups of a mesh with the axes of `device_mesh`, also of some of them only.

        Args:
            mesh: axes `data`, `sequence_data`, `tensor`; an axis of size 1 gives None.
            sequence_parallel: whether the tensor axis also splits hidden states by tokens.
        """
        names = mesh.mesh_dim_names or ()
        unknown = set(names) - set(AXES)
        if unknown or not names:
            raise ValueError(
                f"`mesh` must have axes out of {list(AXES)}, got {list(names)}; name the axes with"
                " `mesh_dim_names`."
            )
        data, sequence_data, tensor = (
            mesh.get_group(axis) if axis in names and mesh[axis].size() > 1 else None
            for axis in AXES
        )
        return cls(tp=tensor, sp=tensor if sequence_parallel else None, sdp=sequence_data, dp=data)


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`, 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's index in `group`, 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def gathers_hidden_states(groups: ParallelGroups) -> bool:
    """Whether the hidden states are sharded by tokens and the head needs all of them."""
    return groups.tp is not None and groups.sp is not None


def head_splits_tokens(groups: ParallelGroups) -> bool:
    """Whether the ranks of `sp` hold different tokens also in the head: its weight is whole."""
    return groups.sp is not None and groups.tp is None


def vocab_shard(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """First and one-past-last row of `rank`'s shard of `num_rows` vocabulary rows.

    Shards have ceil(num_rows / size) rows, the last ones fewer or none: the layout of DTensor's
    `Shard(0)`, and Megatron's where `size` divides `num_rows`.
    """
    shard = -(-num_rows // size)
    return min(rank * shard, num_rows), min((rank + 1) * shard, num_rows)


def gather_first_dim(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' `tensor` [n, ...] one after the other, [size n, ...]; not differentiable."""
    whole = tensor.new_empty(group_size(group) * tensor.shape[0], *tensor.shape[1:])
    _all_gather(whole, tensor.contiguous(), group=group)
    return whole


def reduce_scatter_first_dim(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part [n, ...] of the sum of `tensor` [size n, ...]; not differentiable."""
    part = tensor.new_empty(tensor.shape[0] // group_size(group), *tensor.shape[1:])
    _reduce_scatter(part, tensor.contiguous(), group=group)
    return part


def start_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> tuple[dist.Work, Tensor]:
    """As `reduce_scatter_first_dim`, under way: `wait` before the part is used."""
    part = tensor.new_empty(tensor.shape[0] // group_size(group), *tensor.shape[1:])
    work = _reduce_scatter(part, tensor, group=group, async_op=True)
    return work, part


class _AllReduceSum(torch.autograd.Function):
    """Sum over groups; every rank's loss depends on the sum, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return _all_reduced(tensor, groups)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad_outputs[0], ctx.groups), None


def _all_reduced(tensor: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    sum_over_ranks_(tensor, groups)
    return tensor


def sum_over_ranks_(tensor: Tensor, groups: Sequence[ProcessGroup | None]) -> None:
    """Sums `tensor` over the ranks of all `groups`, in place; not differentiable."""
    for group in groups:
        if group is not None:
            dist.all_reduce(tensor, group=group)


def all_reduce_sum(tensor: Tensor, groups: Sequence[ProcessGroup | None]) -> Tensor:
    """Sum of `tensor` over the ranks of all `groups`, differentiable on every rank.

    The gradient is the sum of the ranks' gradients: exact when the global loss is the sum of the
    ranks' losses. Every rank must run the backward.
    """
    present = [group for group in groups if group is not None]
    if not present:
        return tensor
    result: Tensor = _AllReduceSum.apply(tensor, present)
    return result


class _Gather(torch.autograd.Function):
    """Concatenation over ranks; the gradient of a part is summed over the ranks that used it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_first_dim(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_first_dim(grad_outputs[0], ctx.group), None


def all_gather(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The ranks' `tensor` [n, ...] one after the other, [size n, ...], differentiable.

    The gradient is the sum of the ranks' gradients of this rank's part, in `tensor`'s dtype: exact
    when the global loss is the sum of the ranks' losses. Every rank must run the backward.
    """
    if group is None:
        return tensor
    result: Tensor = _Gather.apply(tensor, group)
    return result


BUCKET_BYTES = 64 * 2**20


def all_reduce_tensors(tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Sums each of the tensors over the ranks of `group`, in place, in few large collectives.

    Every rank must give tensors of the same shapes and dtypes in the same order.
    """
    if group is None:
        return
    bucket: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        size = sum(part.nbytes for part in bucket)
        following = tensors[index + 1] if index + 1 < len(tensors) else None
        if (
            following is None
            or following.dtype != tensor.dtype
            or size + following.nbytes > BUCKET_BYTES
        ):
            flat = torch.cat([part.flatten() for part in bucket])
            dist.all_reduce(flat, group=group)
            for part, total in zip(
                bucket, flat.split([part.numel() for part in bucket]), strict=True
            ):
                part.copy_(total.view_as(part))
            bucket = []


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a DTensor, on each rank, which all must call; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(
    whole: Tensor,
    parameter: Tensor,  # of the same shape
) -> Tensor:
    """This rank's part of `whole`, which every rank has, as `parameter` is sharded."""
    if not isinstance(parameter, DTensor):
        return whole
    # No rank sends: each cuts its own part.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def local_part(parameter: Tensor) -> tuple[slice, ...]:
    """The part of the whole that this rank holds of a parameter, by dimension."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    (chunk,) = parameter.__create_chunk_list__()
    return tuple(
        slice(offset, offset + size)
        for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )


def with_layout_of(
    part: Tensor,  # this rank's, as `local_part` says
    parameter: Tensor,
) -> Tensor:
    """A tensor on the device of `parameter`, sharded as it is, from the part of each rank."""
    part = part.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
