"""The processes of a run: their ranks, collectives, and how a model is sharded over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from fastrl.config.base import UserError
from fastrl.config.model import LlamaConfig
from fastrl.config.training import ParallelConfig
from fastrl.environments.parent import end_with_parent
from fastrl.models.compiled import compile_layers
from fastrl.models.llama import Llama
from fastrl.models.parallelize import parallelize_llama
from fastrl.parallel import ParallelGroups, device_mesh, shard_like, whole_tensor
from fastrl.training.watch import Watch

_TIMEOUT = 1800.0
"""Seconds without progress on several processes, if `parallel.timeout` is not given."""

# torch's own bound on a collective, which says less, comes after that of the watch.
_SECONDS_FOR_THE_WATCH = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Attributes:
        config: the sizes of the axes.
        rank: of this process; 0 prints and writes.
        device: of this process.
        mesh: of all processes; None for one without FSDP2.
        compile_layers: whether models get compiled decoder layers.
        watch: ends this process when it makes no progress; None for one process.
        host_group: of all processes, for what their hosts agree on; on GPUs it is gloo's, since
            NCCL's answer comes after all that the device was given before. None for one process.
    """

    config: ParallelConfig
    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    compile_layers: bool = False
    watch: Watch | None = None
    host_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process; all must call."""
        return bool(self.highest(int(flag)))

    def highest(self, number: int) -> int:
        """The highest of the numbers of all processes; all must call."""
        if self.size == 1:
            return number
        most = torch.tensor(number, device="cpu")
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.host_group)
        return int(most)

    def progress(self) -> None:
        """Says that this process goes on: a step, an evaluation or a checkpoint begins."""
        if self.watch is not None:
            self.watch.progress()

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank, sent as pickles; all must call."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def from_main(self, decide: Callable[[], T]) -> T:
        """What a function gives on rank 0, on all processes; all must call.

        Raises:
            UserError, OSError: what the function raised, on all processes.
        """
        decided: T | UserError | OSError | None = None
        if self.is_main:
            try:
                decided = decide()
            except (UserError, OSError) as error:  # the others wait for a decision
                decided = error
        decided = self.gather(decided)[0]
        if isinstance(decided, UserError | OSError):
            raise decided
        return cast("T", decided)

    def share_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this process writes of a model's: its shards, and of what is replicated a share."""
        parallel = self.config
        replicas = 1 if parallel.fully_sharded else parallel.data * parallel.sequence_data
        replica = 0 if replicas == 1 else self.rank // parallel.tensor
        return {
            key: tensor
            for index, (key, tensor) in enumerate(tensors.items())
            if index % replicas == replica
        }

    @property
    def size(self) -> int:
        return self.config.num_processes

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Of activations and gathered weights, where it is not that of the parameters."""
        name = self.config.compute_dtype
        return None if name is None else getattr(torch, name)

    def new_sampler_copy(self, llama: Llama) -> Llama:
        """An unsharded model in the compute dtype, for `sync_full_weights` to fill."""
        dtype = self.compute_dtype or llama.model.norm.weight.dtype
        copy = Llama(llama.config, device="meta", dtype=dtype).to_empty(device=self.device)
        return copy.requires_grad_(False).eval()

    def parallelize(self, llama: Llama) -> ParallelGroups:
        """Compiles and shards a model, preferably on the meta device, as the run says."""
        if self.compile_layers:
            compile_layers(llama.model.layers)
        if self.mesh is None:
            return ParallelGroups()
        return parallelize_llama(
            llama,
            self.mesh,
            sequence_parallel=self.config.sequence_parallel,
            fully_sharded=self.config.fully_sharded,
            compute_dtype=self.compute_dtype,
            reshard_after=self.config.reshard_after,
        )

    def close(self) -> None:
        """Leaves the process group, at the end of a run without an error; all must call.

        They leave together: torchrun takes the first that ends with an exit code other than 0 as a
        reason to end the others, one of which may still write a checkpoint.
        """
        self.progress()
        self.any(False)
        if self.mesh is not None:
            dist.destroy_process_group()
        if self.watch is not None:
            self.watch.end()


def start_processes(config: ParallelConfig, device: torch.device) -> Processes:
    """This process among those that torchrun started; one process alone starts no group.

    Args:
        config: the sizes of the axes.
        device: `cuda` without a number is the GPU of the process's local rank.

    Raises:
        UserError: more or fewer processes than the axes need; on every process, before any
            collective.
    """
    found = int(os.environ.get("WORLD_SIZE", "1"))
    needed = config.num_processes
    if found != needed:
        raise UserError(
            f"`parallel` must have sizes that multiply to the number of processes, {found}, got"
            f" data {config.data} x sequence_data {config.sequence_data} x tensor {config.tensor} ="
            f" {needed}; start it with `torchrun --nproc-per-node {needed} -m fastrl train ...` or"
            " change the sizes"
        )
    if dist.is_torchelastic_launched():
        end_with_parent()  # a job that is started again must find nobody in its run folder
    if needed == 1 and not config.fully_sharded:
        return Processes(config, 0, device, None)
    timeout = _TIMEOUT if config.timeout is None else config.timeout
    bound = timedelta(seconds=timeout + _SECONDS_FOR_THE_WATCH)
    watch = None
    if needed > 1:
        watch = Watch(timeout, f"rank {os.environ.get('RANK', '?')} of {needed}")
    backend = "gloo"
    if device.type == "cuda":
        backend = "nccl"
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if needed == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        shared, rank, size = next(rendezvous("env://", timeout=bound))
        # torchrun's restarts share its store, where the addresses of the dead are still to be read.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = dist.PrefixStore(f"attempt {attempt}", shared)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=bound)
    mesh = device_mesh(
        data=config.data,
        sequence_data=config.sequence_data,
        tensor=config.tensor,
        device_type=device.type,
    )
    host_group = None
    if needed > 1:
        for group in mesh.get_all_groups():  # made with torch's own bound, 10 minutes for NCCL
            dist.distributed_c10d._set_pg_timeout(bound, group)
        host_group = dist.group.WORLD
        if backend == "nccl":
            host_group = dist.new_group(backend="gloo", timeout=bound)
    return Processes(config, dist.get_rank(), device, mesh, watch=watch, host_group=host_group)


@torch.no_grad()
def sync_full_weights(model: nn.Module, copy: nn.Module) -> None:
    """Copies the weights of a sharded model into a whole one; all ranks must call."""
    targets = dict(copy.named_parameters())
    for name, parameter in model.named_parameters():
        targets[name].copy_(whole_tensor(parameter))


def empty_llama(config: LlamaConfig, processes: Processes, dtype: torch.dtype) -> Llama:
    """A model sharded over the processes, with uninitialised weights.

    Raises:
        UserError: sizes of the model that the tensor axis does not divide.
    """
    llama = Llama(config, device="meta", dtype=dtype)
    try:
        processes.parallelize(llama)
    except ValueError as error:
        raise UserError(f"`parallel`: {error}") from error
    return llama.to_empty(device=processes.device)


@torch.no_grad()
def load_full_weights(llama: Llama, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies whole weights, which every rank has, into a sharded model."""
    for name, parameter in llama.named_parameters():
        parameter.copy_(shard_like(weights[name].to(parameter.device), parameter))


@torch.no_grad()
def frozen_copy(llama: Llama, processes: Processes) -> Llama:
    """A copy of the model, sharded in the same way, without gradients and in evaluation mode."""
    copy = empty_llama(llama.config, processes, next(llama.parameters()).dtype)
    for mine, theirs in zip(copy.parameters(), llama.parameters(), strict=True):
        mine.copy_(theirs)
    return copy.requires_grad_(False).eval()
