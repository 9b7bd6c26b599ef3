"""What a resumption needs beside the weights, and its files in a checkpoint.

    trainer/progress.json           numbers of the run; its `format` is 2
    trainer/optimizer.safetensors   `<parameter>.<moment or step>`, as torch's AdamW names them
    trainer/reference.safetensors   the frozen reference policy, if the phase has one

No hyperparameter is among them: those are the config's. Nor is a generator's state, since random
numbers follow from the seed and the step. A checkpoint of format 1 has one `trainer.pt`.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastrl.config import RunConfig, UserError, parse_config
from fastrl.config.base import Config

TRAINER_FOLDER = "trainer"
PROGRESS_FILE = "progress.json"
OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
FORMAT_1_FILE = "trainer.pt"

_OF_PARAMETER = ("exp_avg", "exp_avg_sq")
_STEP = "step"
_COUNT = Field(ge=0, le=2**53)


@dataclass(frozen=True)
class TrainerState:
    """The progress of a run.

    Attributes:
        phase: index of the phase.
        phase_step: steps done in it.
        step: steps done in the run.
        position: of the phase's data source.
        seconds: that the run took so far.
        rewards: held-out reward before each phase that has begun; NaN without an environment.
        optimizer: moments and step by the parameter's name, empty before the phase's first update;
            None before its first checkpoint.
        reference: weights of the frozen reference policy, if the phase has one.
        entropy_bonus: state of the controllers of the phase's losses, by the loss's name.
        problems: digest of the environment's problems; empty without an environment.
        files: SHA-256 of the rollout files of this phase and later ones, by their path; none from
            a checkpoint of format 1.
        skipped_in_a_row: the phase's last updates that were left out, one after another.
    """

    phase: int = 0
    phase_step: int = 0
    step: int = 0
    position: int = 0
    seconds: float = 0.0
    rewards: tuple[float, ...] = ()
    optimizer: dict[str, dict[str, Tensor]] | None = None
    reference: dict[str, Tensor] | None = None
    entropy_bonus: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: str = ""
    files: dict[str, str] = field(default_factory=dict)
    skipped_in_a_row: int = 0


class _EntropyBonus(Config):
    factor: float
    is_acting: float = Field(ge=0, le=1)


class _Progress(Config):
    """What progress.json must be."""

    format: Literal[2]
    phase: int = _COUNT
    phase_step: int = _COUNT
    step: int = _COUNT
    position: int = _COUNT
    seconds: float = Field(ge=0)
    rewards: tuple[float | None, ...]
    entropy_bonus: dict[str, _EntropyBonus]
    problems: str
    files: dict[str, str]
    skipped_in_a_row: int = _COUNT


def write_trainer_state(state: TrainerState, checkpoint: Path) -> None:
    """Writes the files of a state, whose tensors are whole, into a checkpoint's folder.

    Raises:
        OSError: they cannot be written.
    """
    folder = checkpoint / TRAINER_FOLDER
    folder.mkdir()
    values = {name: getattr(state, name) for name in _Progress.model_fields if name != "format"}
    values["rewards"] = [None if math.isnan(reward) else reward for reward in state.rewards]
    text = json.dumps({"format": 2, **values}, indent=2, allow_nan=False)
    (folder / PROGRESS_FILE).write_text(f"{text}\n", encoding="utf-8")
    tensors = {
        f"{parameter}.{name}": tensor
        for parameter, values in (state.optimizer or {}).items()
        for name, tensor in values.items()
    }
    _save_tensors(tensors, folder / OPTIMIZER_FILE)
    if state.reference is not None:
        _save_tensors(state.reference, folder / REFERENCE_FILE)


def read_trainer_state(checkpoint: Path, config: RunConfig, llama: nn.Module) -> TrainerState:
    """The state in a checkpoint, checked against config and model.

    The fields of a format 1 file are read by torch.load with `weights_only=True`.

    Raises:
        UserError: a file that is missing or malformed; numbers that the config's phases do not
            take; tensors of other names, shapes or dtypes than the model's parameters need.
    """
    folder = checkpoint / TRAINER_FOLDER
    if is_format_1(checkpoint):
        source = checkpoint / FORMAT_1_FILE
        values, optimizer, reference = _read_format_1(source, llama)
        optimizer_source = reference_source = source
    else:
        source, optimizer_source = folder / PROGRESS_FILE, folder / OPTIMIZER_FILE
        reference_source = folder / REFERENCE_FILE
        values = read_json(source)
        optimizer = _by_parameter(_load_tensors(optimizer_source))
        reference = _load_tensors(reference_source) if reference_source.exists() else None
    progress = parse_config(_Progress, values, source=str(source))
    _check_progress(source, progress, config)
    trained = {name: p for name, p in llama.named_parameters() if p.requires_grad}
    if optimizer:
        _check_optimizer(optimizer_source, optimizer, trained)
    if reference is not None:
        _check_tensors(reference_source, reference, dict(llama.named_parameters()))
    numbers = {name: getattr(progress, name) for name in _Progress.model_fields}
    del numbers["format"]
    numbers["rewards"] = tuple(math.nan if r is None else r for r in progress.rewards)
    numbers["entropy_bonus"] = {
        n: bonus.model_dump() for n, bonus in progress.entropy_bonus.items()
    }
    return TrainerState(**numbers, optimizer=optimizer, reference=reference)


def is_format_1(checkpoint: Path) -> bool:
    """Whether a folder is a checkpoint of format 1, which has no checksums."""
    return (checkpoint / FORMAT_1_FILE).is_file() and not (checkpoint / TRAINER_FOLDER).exists()


def trained_names(module: nn.Module) -> list[str]:
    """The names of the trainable parameters in the order of `build_optimizer`."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return [name for name, p in sorted(parameters, key=lambda named: named[1].ndim <= 1)]


def read_json(file: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        UserError: the file is missing or malformed.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: must be JSON in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: must be a JSON object, is a {type(values).__name__}")
    return values


def _save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:  # an error of the file system
        raise OSError(f"{file}: {error}") from error


def _load_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: must be a safetensors file: {error}") from error


def _by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    result: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, part = name.rpartition(".")
        result.setdefault(parameter, {})[part] = tensor
    return result


def _read_format_1(
    file: Path, llama: nn.Module
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], dict[str, Tensor] | None]:
    """Numbers, optimizer state and reference of a file of format 1."""
    try:
        values = torch.load(file, weights_only=True, map_location="cpu")
        optimizer, reference = values.pop("optimizer"), values.pop("reference")
        names = trained_names(llama)
        moments = {names[index]: dict(state.items()) for index, state in optimizer["state"].items()}
        if reference is not None:
            wanted = dict(llama.named_parameters())  # a tied head stood there twice
            reference = {name: tensor for name, tensor in reference.items() if name in wanted}
        numbers = {"format": 2, "files": {}, "skipped_in_a_row": 0, **values}
        numbers["rewards"] = [
            None if math.isnan(reward) else reward for reward in values["rewards"]
        ]
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (
        RuntimeError, TypeError, ValueError, LookupError, AttributeError, EOFError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        raise UserError(f"{file}: must be the state of a trainer: {error!r}") from error
    return numbers, moments, reference


def _check_progress(file: Path, progress: _Progress, config: RunConfig) -> None:
    """Raises the first number that the phases of the config do not have."""
    phases = config.phases
    _check_number(file, "phase", progress.phase, range(len(phases)))
    phase = phases[progress.phase]
    _check_number(file, "phase_step", progress.phase_step, range(phase.steps + 1))
    step = sum(before.steps for before in phases[: progress.phase]) + progress.phase_step
    _check_number(file, "step", progress.step, [step])
    number = len(progress.rewards)
    _check_number(file, "number of rewards", number, range(progress.phase, progress.phase + 2))
    skipped = range(phase.optimizer.max_skipped_updates + 1)
    _check_number(file, "skipped_in_a_row", progress.skipped_in_a_row, skipped)
    if phase.type == "supervised":
        position = progress.phase_step * phase.documents_per_step
        _check_number(file, "position", progress.position, [position])
    elif phase.rollouts.type == "sampler":
        position = progress.phase_step * phase.rollouts.prompts_per_step
        _check_number(file, "position", progress.position, [position])


def _check_number(file: Path, name: str, value: int, allowed: Sequence[int]) -> None:
    if value not in allowed:
        bound = f"{allowed[0]}" if len(allowed) == 1 else f"from {allowed[0]} to {allowed[-1]}"
        raise UserError(f"{file}: `{name}` must be {bound} with the run's config, got {value}")


def _check_optimizer(
    file: Path, optimizer: Mapping[str, Mapping[str, Tensor]], trained: Mapping[str, Tensor]
) -> None:
    """Raises one error that lists what does not fit the trained parameters."""
    wanted = {
        f"{name}.{part}": parameter for name, parameter in trained.items() for part in _OF_PARAMETER
    }
    wanted |= {f"{name}.{_STEP}": torch.empty((), dtype=torch.float32) for name in trained}
    found = {
        f"{name}.{part}": tensor
        for name, parts in optimizer.items()
        for part, tensor in parts.items()
    }
    _check_tensors(file, found, wanted)


def _check_tensors(file: Path, found: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    problems = [f"missing `{name}`" for name in wanted if name not in found]
    problems += [f"unexpected `{name}`" for name in found if name not in wanted]
    for name, expected in wanted.items():
        tensor = found.get(name, expected)
        if not isinstance(tensor, Tensor):
            problems.append(f"`{name}` must be a tensor, is a {type(tensor).__name__}")
        elif (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            problems.append(
                f"`{name}` must have shape {list(expected.shape)} and {expected.dtype}, got "
                f"{list(tensor.shape)} and {tensor.dtype}"
            )
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise UserError(f"{file}: the tensors do not fit the model:\n{shown}{more}")
