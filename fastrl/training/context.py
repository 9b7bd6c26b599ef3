"""From a config to the context of a run: device, tokenizer, environment, model, sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastrl.config.base import UserError
from fastrl.config.model import WHOLE_DOCUMENTS, LlamaConfig
from fastrl.config.training import ParallelConfig, RunConfig
from fastrl.models.varlen import varlen_refusal
from fastrl.training.build_model import build_model, model_folder
from fastrl.training.environment import RunEnvironment
from fastrl.training.model import TrainedModel
from fastrl.training.processes import Processes, start_processes
from fastrl.training.sampler import Sampler
from fastrl.training.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class RunContext:
    """The objects that training, evaluation and sampling share."""

    processes: Processes
    tokenizer: Tokenizer
    environment: RunEnvironment | None
    model: TrainedModel
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
        with_weights: whether to make or load them; without, a Llama is on the meta device
            (a model of transformers is loaded all the same: its code says what it is).

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
    tokenizer = build_tokenizer(config.tokenizer, model_folder(config, checkpoint))
    environment = None
    if config.environment is not None and with_environment:
        environment = RunEnvironment(config.environment, config.seed, processes, launch=is_run)
        _check_prompts(environment, tokenizer)
    if isinstance(config.model, LlamaConfig):
        compute_dtype = config.parallel.compute_dtype if is_run else None
        _check_attention(config.model, compute_dtype or config.dtype, device)
    torch.manual_seed(config.seed)
    model, decoder = build_model(
        config, tokenizer, processes, checkpoint, with_weights=with_weights
    )
    generator = torch.Generator(device)
    sampler = Sampler(config.sampler, decoder, tokenizer.end_tokens, generator, processes)
    return RunContext(processes, tokenizer, environment, model, generator, sampler)


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


def _check_attention(config: LlamaConfig, dtype: str, device: torch.device) -> None:
    """Refuses an implementation that the device or the activations do not have."""
    name = config.attention_implementation
    problem = None
    if name in WHOLE_DOCUMENTS:
        problem = varlen_refusal(name, device, getattr(torch, dtype))
    elif name == "flex" and device.type != "cuda":
        problem = f"needs a CUDA device, got {device}"
    elif name == "flex" and dtype == "float64":
        problem = "has no float64"
    if problem is not None:
        raise UserError(f"`model.attention_implementation: {name}` {problem}; or use `auto`")
