"""From a config to the context of a run: device, tokenizer, environment, model, sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastrl.config.base import UserError
from fastrl.config.model import LlamaConfig
from fastrl.config.training import ParallelConfig, RunConfig
from fastrl.models.checkpoint import load_weights, read_llama_config
from fastrl.models.llama import Llama
from fastrl.training.environment import RunEnvironment
from fastrl.training.processes import Processes, empty_llama, load_full_weights, start_processes
from fastrl.training.sampler import Sampler
from fastrl.training.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class RunContext:
    """The objects that training, evaluation and sampling share."""

    processes: Processes
    tokenizer: Tokenizer
    environment: RunEnvironment | None
    llama: Llama
    generator: torch.Generator
    sampler: Sampler

    @property
    def device(self) -> torch.device:
        return self.processes.device


def processes_of(config: RunConfig) -> Processes:
    """The processes of a run; all of them must call.

    Raises:
        UserError: as `start_processes`; a device that is not there.
    """
    return start_processes(config.parallel, _device(config.device))


def build_context(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    with_environment: bool = True,
    processes: Processes | None = None,
    with_weights: bool = True,
) -> RunContext:
    """The context of a run. Seeds torch's global generator, which initialises the weights.

    Args:
        config: of the run.
        checkpoint: folder of the weights, in place of the config's model.
        with_environment: whether to build the environment, if the config has one.
        processes: from `processes_of`; default: this one alone.
        with_weights: whether to make or load them; without, the model is on the meta device.

    Raises:
        UserError: the config asks for something that is not available.
    """
    is_run = processes is not None
    if processes is None:
        processes = start_processes(ParallelConfig(), _device(config.device))
    processes = replace(processes, compile_layers=config.compile)
    device = processes.device
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    folder = _model_folder(config, checkpoint)
    tokenizer = build_tokenizer(config.tokenizer, folder)
    environment = None
    if config.environment is not None and with_environment:
        environment = RunEnvironment(config.environment, config.seed, processes, launch=is_run)
        _check_prompts(environment, tokenizer)
    if isinstance(config.model, LlamaConfig):
        compute_dtype = config.parallel.compute_dtype if is_run else None
        _check_attention(config.model, compute_dtype or config.dtype, device)
    torch.manual_seed(config.seed)
    llama_config = _llama_config(config, tokenizer, folder)
    if with_weights:
        llama = _build_llama(config, llama_config, processes, folder)
    else:
        llama = Llama(llama_config, device="meta")
    generator = torch.Generator(device)
    sampler = Sampler(config.sampler, llama, tokenizer.end_tokens, generator, processes)
    return RunContext(processes, tokenizer, environment, llama, generator, sampler)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"`device` is {name!r}, but torch finds {torch.cuda.device_count()} CUDA devices here; "
            "use `auto`"
        )
    return device


def _check_prompts(environment: RunEnvironment, tokenizer: Tokenizer) -> None:
    """Refuses prompts that cannot be sampled from, before the run begins."""
    for problem in (*environment.heldout, *environment.train):
        if not tokenizer.encode(problem.prompt):
            is_entry = isinstance(problem.data, dict) and "question" in problem.data
            source = problem.data["question"] if is_entry else problem
            raise UserError(
                "`environment`: every prompt must have at least one token, but the prompt of "
                f"{source!r} is {problem.prompt!r}; see `environment.prompt`"
            )


def _model_folder(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """The folder of weights and tokenizer; None for a new model."""
    if checkpoint is not None or isinstance(config.model, LlamaConfig):
        return checkpoint
    return Path(config.model.path)


def _llama_config(config: RunConfig, tokenizer: Tokenizer, folder: Path | None) -> LlamaConfig:
    """The sizes of the model: those of `folder`, or as `config.model` says."""
    if folder is not None:
        llama_config = read_llama_config(folder, head=config.model.head)
        _check_vocabulary(llama_config, tokenizer, str(folder))
        return llama_config
    model = config.model
    assert isinstance(model, LlamaConfig)
    vocab_size = tokenizer.vocab_size if model.vocab_size is None else model.vocab_size
    end_token = tokenizer.end_tokens[0] if model.eos_token_id is None else model.eos_token_id
    llama_config = model.model_copy(update={"vocab_size": vocab_size, "eos_token_id": end_token})
    _check_end_token(llama_config)
    _check_vocabulary(llama_config, tokenizer, "`model`")
    _check_padding(llama_config)
    return llama_config


def _build_llama(
    config: RunConfig, llama_config: LlamaConfig, processes: Processes, folder: Path | None
) -> Llama:
    """The model with the weights of `folder`, or new ones."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    if folder is not None:
        llama = empty_llama(llama_config, processes, dtype)
        load_weights(llama, folder)
        return llama
    llama = Llama(llama_config, device=processes.device, dtype=dtype)
    if processes.mesh is None:
        processes.parallelize(llama)
        return llama
    # Initialised whole, so that the weights are those of a run on one process.
    llama_shards = empty_llama(llama_config, processes, dtype)
    load_full_weights(llama_shards, dict(llama.named_parameters()))
    return llama_shards


def _check_vocabulary(config: LlamaConfig, tokenizer: Tokenizer, source: str) -> None:
    """Refuses a tokenizer with ids that the model has no embedding for."""
    needed = 1 + max(tokenizer.vocab_size - 1, *tokenizer.end_tokens)
    assert config.vocab_size is not None
    if config.vocab_size < needed:
        raise UserError(
            f"{source}: `vocab_size` must be at least the tokenizer's {needed}, got "
            f"{config.vocab_size}"
        )


def _check_attention(config: LlamaConfig, dtype: str, device: torch.device) -> None:
    """Refuses an implementation that the device or the activations do not have."""
    name = config.attention_implementation
    problem = None
    if name in ("flex", "varlen") and device.type != "cuda":
        problem = f"needs a CUDA device, got {device}"
    elif name == "varlen" and dtype != "bfloat16":
        problem = (
            f"needs 16-bit activations, got {dtype}; give `parallel.compute_dtype: bfloat16` (and "
            "`parallel.fully_sharded: true`)"
        )
    elif name == "flex" and dtype == "float64":
        problem = "has no float64"
    if problem is not None:
        raise UserError(f"`model.attention_implementation: {name}` {problem}; or use `auto`")


def _check_padding(config: LlamaConfig) -> None:
    """Refuses fewer rows than the vocabulary, which may be the tokenizer's, has ids."""
    rows, needed = config.padded_vocab_size, config.vocab_size
    assert needed is not None
    if rows is not None and rows < needed:
        raise UserError(
            "`model`: `padded_vocab_size` must be at least the vocabulary size "
            f"{needed}, got {rows}"
        )


def _check_end_token(config: LlamaConfig) -> None:
    ids = config.eos_token_id
    assert config.vocab_size is not None
    for token in ids if isinstance(ids, tuple) else [ids or 0]:
        if token >= config.vocab_size:
            raise UserError(
                f"`model.eos_token_id` must be below the vocabulary size {config.vocab_size}, got "
                f"{token}"
            )
