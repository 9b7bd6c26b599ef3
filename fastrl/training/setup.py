"""From a config to the parts of a run: device, tokenizer, environment, model, sampler."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from fastrl.config.base import UserError
from fastrl.config.model import LlamaConfig
from fastrl.config.training import ParallelConfig, RunConfig
from fastrl.models.checkpoint import load_llama
from fastrl.models.llama import Llama
from fastrl.training.environment import ReasoningGymEnvironment
from fastrl.training.sampler import Sampler
from fastrl.training.tokenizer import Tokenizer, build_tokenizer

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Parts:
    """What training, evaluation and sampling work with."""

    device: torch.device
    tokenizer: Tokenizer
    environment: ReasoningGymEnvironment | None
    llama: Llama
    generator: torch.Generator
    sampler: Sampler


def build_parts(
    config: RunConfig, *, checkpoint: Path | None = None, with_environment: bool = True
) -> Parts:
    """Returns the parts of a run; seeds torch's global generator for the weights.

    Args:
        config: of the run.
        checkpoint: folder that the weights come from instead of the config's model.
        with_environment: whether problems are needed.

    Raises:
        UserError: the config asks for something that is not there.
    """
    check_parallel(config.parallel)
    device = _device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    tokenizer = build_tokenizer(config.tokenizer)
    environment = None
    if config.environment is not None and with_environment:
        environment = ReasoningGymEnvironment(config.environment, config.seed)
    torch.manual_seed(config.seed)
    llama = _build_llama(config, tokenizer, device, checkpoint)
    generator = torch.Generator(device)
    sampler = Sampler(config.sampler, llama, tokenizer.end_token, generator)
    return Parts(device, tokenizer, environment, llama, generator, sampler)


def check_parallel(parallel: ParallelConfig) -> None:
    """Raises an error for a run over several processes, which the trainer does not do."""
    sizes = {
        "data": parallel.data,
        "sequence_data": parallel.sequence_data,
        "tensor": parallel.tensor,
    }
    for name, size in sizes.items():
        if size != 1:
            raise UserError(
                f"`parallel.{name}` must be 1, as the trainer runs in one process, got {size}"
            )
    if parallel.sequence_parallel:
        raise UserError("`parallel.sequence_parallel` must be false with one process, got true")
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise UserError(
            f"the trainer runs in one process, but torchrun started {world_size} "
            "(WORLD_SIZE); start it with `fastrl train`"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"`device` must be `auto`, `cpu` or `cuda`, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"`device` is {name!r}, but torch finds no CUDA device here; use `auto`")
    return device


def _build_llama(
    config: RunConfig, tokenizer: Tokenizer, device: torch.device, checkpoint: Path | None
) -> Llama:
    dtype = DTYPES[config.dtype]
    model = config.model
    if checkpoint is not None or not isinstance(model, LlamaConfig):
        folder = checkpoint or Path(model.path)  # type: ignore[union-attr]
        llama = load_llama(folder, head=model.head, device=device, dtype=dtype)
        source = str(folder)
    else:
        vocab_size = tokenizer.vocab_size if model.vocab_size is None else model.vocab_size
        end_token = tokenizer.end_token if model.eos_token_id is None else model.eos_token_id
        update = {"vocab_size": vocab_size, "eos_token_id": end_token}
        llama = Llama(model.model_copy(update=update), device=device, dtype=dtype)
        source = "`model`"
    assert llama.config.vocab_size is not None
    if llama.config.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"{source}: `vocab_size` must be at least the tokenizer's {tokenizer.vocab_size}, got "
            f"{llama.config.vocab_size}"
        )
    return llama
