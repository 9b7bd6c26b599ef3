"""A checkpoint that ranks of the pool write from shards, and read as the shards of other layouts.

Whole tensors are refused meanwhile: `DTensor.full_tensor` fails.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl import LlamaConfig
from fastrl.config import RunConfig, UserError
from fastrl.config.training import ParallelConfig
from fastrl.models import checkpoint
from fastrl.parallel import shard_like, whole_tensor
from fastrl.training import tensor_files
from fastrl.training.llama_model import llama_files
from fastrl.training.optimizer import build_optimizer, load_optimizer, optimizer_state
from fastrl.training.processes import Processes, empty_llama, frozen_copy
from fastrl.training.saving import CheckpointSaver
from fastrl.training.trainer_state import TrainerState, read_trainer_state, trained_names
from tests.helpers.ranks import rank_mesh
from tests.helpers.runs import tiny

Whole = dict[str, dict[str, Tensor]]
"""Whole tensors by file and name."""

LAYOUTS = {
    "one": ParallelConfig(),
    "dp2": ParallelConfig(data=2),
    "fsdp2": ParallelConfig(data=2, fully_sharded=True),
    "tp2": ParallelConfig(tensor=2),
    "dp2_tp2": ParallelConfig(data=2, tensor=2),
    "fsdp2_tp2": ParallelConfig(data=2, tensor=2, sequence_parallel=True, fully_sharded=True),
    "fsdp4": ParallelConfig(data=2, sequence_data=2, fully_sharded=True),
}

WEIGHTS = "model.safetensors"
OPTIMIZER = "trainer/optimizer.safetensors"
REFERENCE = "trainer/reference.safetensors"


def config(*, tied: bool = False) -> LlamaConfig:
    """Sizes that neither two nor four ranks divide, where the layouts permit it."""
    return LlamaConfig.model_validate(
        {
            "vocab_size": 13,
            "hidden_size": 10,
            "head_dim": 6,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 14,
            "tie_word_embeddings": tied,
            "head": {"losses": {"answers": {"type": "cross_entropy"}}},
        }
    )


def processes(layout: str) -> Processes:
    parallel = LAYOUTS[layout]
    if layout == "one":
        return Processes(parallel, 0, torch.device("cpu"), None)
    mesh = rank_mesh(parallel.data, parallel.sequence_data, parallel.tensor)
    return Processes(parallel, dist.get_rank(), torch.device("cpu"), mesh)


class Saved:
    """Sharded weights, moments and reference, after an update by gradients from a seed."""

    def __init__(self, layout: str, *, tied: bool = False) -> None:
        self.processes = processes(layout)
        self.llama = empty_llama(config(tied=tied), self.processes, torch.float32)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.llama.parameters():
                value = torch.rand(parameter.shape, generator=generator) - 0.5
                parameter.copy_(shard_like(value, parameter))
        self.reference = frozen_copy(self.llama, self.processes)
        self.optimizer = build_optimizer(self.llama, tiny().phases[0].optimizer)
        for parameter in self.llama.parameters():
            value = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.grad = shard_like(value, parameter)
        self.optimizer.step()

    def state(self) -> TrainerState:
        return TrainerState(
            phase_step=3,
            step=3,
            position=3 * 32,
            rewards=(0.5,),
            optimizer=optimizer_state(self.optimizer, trained_names(self.llama)),
            reference=dict(self.reference.named_parameters()),
        )

    def whole(self) -> Whole:
        """All tensors; all ranks must call."""
        state = self.state()
        assert state.optimizer is not None
        assert state.reference is not None
        moments = {
            f"{name}.{part}": whole_tensor(value).clone()
            for name, parts in state.optimizer.items()
            for part, value in parts.items()
        }
        weights = dict(self.llama.named_parameters())
        return {
            WEIGHTS: {name: whole_tensor(p.detach()).clone() for name, p in weights.items()},
            OPTIMIZER: moments,
            REFERENCE: {name: whole_tensor(p).clone() for name, p in state.reference.items()},
        }


def forbid_whole_tensors(patch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: DTensor, **_: Any) -> Tensor:
        raise AssertionError(f"a rank asked for all of {tuple(tensor.shape)}")

    patch.setattr(DTensor, "full_tensor", refuse)


def run_config(*overrides: str) -> RunConfig:
    return tiny("phases.0.steps=3", *overrides)


def save(run_dir: Path, layout: str, tied: bool, *overrides: str) -> tuple[Whole, int]:
    """What was saved, and the bytes of it that this rank wrote; the weights change meanwhile."""
    saved = Saved(layout, tied=tied)
    expected = saved.whole()
    written: list[int] = []
    write = tensor_files._write_at
    has_changed = threading.Event()

    def counted(handle: int, content: memoryview, offset: int) -> None:
        if "checkpoint.asynchronous=false" not in overrides:
            assert has_changed.wait(20)
        written.append(len(content))
        write(handle, content, offset)

    with pytest.MonkeyPatch.context() as patch:
        forbid_whole_tensors(patch)
        patch.setattr(tensor_files, "_write_at", counted)
        with CheckpointSaver(run_dir, run_config(*overrides), saved.processes, print) as saver:
            saver.save(llama_files(saved.llama), saved.state(), {"tokenizer.json": b"{}"})
            with torch.no_grad():
                for parameter in (*saved.llama.parameters(), *saved.reference.parameters()):
                    parameter.zero_()
                for parts in saved.optimizer.state.values():
                    for value in parts.values():
                        value.zero_()
            has_changed.set()
    return expected, sum(written)


def read(folder: Path, layout: str, tied: bool, run_dir: Path) -> tuple[Whole, int, int]:
    """What the ranks of a layout read, and save in a run of theirs.

    Returns:
        All tensors; elements that this rank read, and those that it holds.
    """
    saved = Saved(layout, tied=tied)
    elements: list[int] = []

    def counted(tensors: Any, name: str, parameter: Tensor) -> Tensor:
        part = read_part(tensors, name, parameter)
        elements.append(part.numel())
        return part

    read_part = checkpoint.read_part
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        forbid_whole_tensors(patch)
        for module in ("fastrl.training.trainer_state", "fastrl.models.checkpoint"):
            patch.setattr(f"{module}.read_part", counted)
        for parameter in saved.llama.parameters():
            parameter.zero_()
        checkpoint.load_weights(saved.llama, folder)
        state = read_trainer_state(folder, run_config(), saved.llama)
        assert state.optimizer is not None
        assert state.reference is not None
        saved.optimizer = build_optimizer(saved.llama, tiny().phases[0].optimizer)
        load_optimizer(saved.optimizer, trained_names(saved.llama), state.optimizer)
        for name, parameter in saved.reference.named_parameters():
            parameter.copy_(state.reference[name])
        with CheckpointSaver(run_dir, run_config(), saved.processes, print) as saver:
            saver.save(llama_files(saved.llama), saved.state(), {})
    local = sum(_local(p).numel() for p in saved.llama.parameters())
    return saved.whole(), sum(elements), 4 * local + len(list(saved.llama.parameters()))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fail_on_rank(run_dir: Path, layout: str, rank: int, error: int) -> str:
    """The message where one rank cannot write."""
    saved = Saved(layout)

    def refuse(handle: int, content: memoryview, offset: int) -> None:
        raise OSError(error, os.strerror(error))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(tensor_files, "_write_at", refuse)
        saver = CheckpointSaver(run_dir, run_config(), saved.processes, print)
        saver.save(llama_files(saved.llama), saved.state(), {})
        with pytest.raises(UserError) as caught:
            saver.wait()
    return str(caught.value)
