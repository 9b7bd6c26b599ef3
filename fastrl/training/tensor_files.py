"""Safetensors files of whole tensors that several ranks write, each its own shards.

A safetensors file is a header that says where each tensor is, and then their bytes. So the place of
every shard follows from the shapes of the whole tensors, and each rank writes its shards there: no
rank has a whole tensor, and the files are those that one process would write.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fastrl.models.checkpoint import FLOAT_DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


@dataclass(frozen=True)
class Place:
    """Where a whole tensor is.

    Attributes:
        file: path relative to the folder.
        offset: of its first byte in the file.
        shape: of the whole tensor.
    """

    file: str
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The files of a folder before any tensor is in them.

    Attributes:
        headers: first bytes of each file.
        sizes: bytes of each file.
        places: of the tensors, by `FILE/NAME`, the keys of `tensors`.
        tensors: this rank's, sharded or not.
    """

    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    places: Mapping[str, Place]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, files: Mapping[str, Mapping[str, Tensor]]) -> Layout:
        """The layout of tensors by file and name, the same on every rank."""
        headers, sizes, places, tensors = {}, {}, {}, {}
        for file, named in files.items():
            # As the safetensors package has it: the widest dtype first, so that all are aligned.
            names = sorted(named, key=lambda name: (-named[name].element_size(), name))
            entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name in names:
                tensor, begin = named[name], end
                end = begin + tensor.numel() * tensor.element_size()
                entries[name] = {
                    "dtype": _DTYPE_NAMES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [begin, end],
                }
            text = json.dumps(entries, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            headers[file] = len(text).to_bytes(8, "little") + text
            sizes[file] = len(headers[file]) + end
            for name in names:
                offset = len(headers[file]) + entries[name]["data_offsets"][0]
                places[f"{file}/{name}"] = Place(file, offset, tuple(named[name].shape))
                tensors[f"{file}/{name}"] = named[name].detach()
        return cls(headers, sizes, places, tensors)


class TensorFilesWriter(StorageWriter):
    """Writes the shards of torch's distributed checkpoint to their places in whole files.

    Args:
        folder: of the files, on a file system that all ranks share.
        layout: of the files.
        begin: called on the first rank before any file is made; makes the folder.
        finish: called there when all ranks' shards are on the disk.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        begin: Callable[[], None],
        finish: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._begin = begin
        self._finish = finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._begin()
        for name, header in self._layout.headers.items():
            file = self._folder / name
            file.parent.mkdir(exist_ok=True)
            with file.open("xb") as stream:
                stream.write(header)
                stream.truncate(self._layout.sizes[name])
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        by_file: dict[str, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._layout.places[item.index.fqn].file].append(item)
        results = []
        for name, items in by_file.items():
            handle = os.open(self._folder / name, os.O_WRONLY)
            try:
                results += [self._write(handle, item, planner) for item in items]
                os.fsync(handle)
            finally:
                os.close(handle)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, handle: int, item: WriteItem, planner: SavePlanner) -> WriteResult:
        assert item.tensor_data is not None
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        place, chunk = self._layout.places[item.index.fqn], item.tensor_data.chunk
        begin = 0
        for first, count in _runs(place.shape, chunk.offsets, chunk.sizes):
            end = begin + count * tensor.element_size()
            _write_at(handle, content[begin:end], place.offset + first * tensor.element_size())
            begin = end
        return WriteResult(index=item.index, size_in_bytes=len(content), storage_data=None)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._finish()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # chosen by nobody but its caller


def write_now(
    tensors: Mapping[str, Tensor], writer: TensorFilesWriter, group: ProcessGroup | None
) -> None:
    """Writes the tensors of all ranks and returns when they are on the disk; all must call.

    Args:
        tensors: this rank's share, by the keys of the layout.
        writer: of the files.
        group: of all ranks; None for one process.

    Raises:
        CheckpointException: on all ranks, if any cannot write.
    """
    with warnings.catch_warnings():
        if group is None:
            ignore_no_dist()
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def ignore_no_dist() -> None:
    """Lets torch write without processes, of which it warns."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")


def failure_of(error: BaseException) -> tuple[int, BaseException]:
    """The first rank that could not write, and why."""
    if not isinstance(error, CheckpointException):
        return 0, error
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    return rank, failure


def _runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """First element in the whole tensor, and number of elements, of a part's unbroken pieces."""
    if 0 in sizes:
        return
    inner = len(shape)  # dimensions from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(sizes[inner:])
    last = sum(
        offset * stride for offset, stride in zip(offsets[inner:], strides[inner:], strict=True)
    )
    outer = [range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    for place in itertools.product(*outer[:inner]):
        yield last + sum(i * s for i, s in zip(place, strides[:inner], strict=True)), count


def _write_at(handle: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(handle, content, offset)
        content, offset = content[written:], offset + written
