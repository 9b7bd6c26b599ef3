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
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fastrl.config import RunConfig, UserError, parse_config
from fastrl.config.base import Config
from fastrl.config.loss_options import HIGHEST_RATIO
from fastrl.models.checkpoint import FLOAT_DTYPES, read_json, read_part, refuse_misfits
from fastrl.parallel import local_part, with_layout_of

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
        optimizer: moments, sharded as the parameter, and step by the parameter's name, empty before
            the phase's first update; None before its first checkpoint.
        reference: weights of the frozen reference policy, sharded as the model's, if the phase has
            one.
        entropy_bonus: state of the controllers of the phase's losses, by the loss's name.
        kl_coefficients: those of the phase that are adapted, by their key in its config.
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
    kl_coefficients: dict[str, float] = field(default_factory=dict)
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
    kl_coefficients: dict[str, Annotated[float, Field(gt=0, le=HIGHEST_RATIO)]] = Field(
        default_factory=dict
    )
    problems: str
    files: dict[str, str]
    skipped_in_a_row: int = _COUNT


def progress_json(state: TrainerState) -> bytes:
    """The content of progress.json."""
    values = {name: getattr(state, name) for name in _Progress.model_fields if name != "format"}
    values["rewards"] = [None if math.isnan(reward) else reward for reward in state.rewards]
    text = json.dumps({"format": 2, **values}, indent=2, allow_nan=False)
    return f"{text}\n".encode()


def state_tensors(state: TrainerState) -> dict[str, dict[str, Tensor]]:
    """The tensors of a state by their file, relative to the checkpoint, and their name there."""
    tensors = {
        f"{parameter}.{name}": tensor
        for parameter, values in (state.optimizer or {}).items()
        for name, tensor in values.items()
    }
    files = {f"{TRAINER_FOLDER}/{OPTIMIZER_FILE}": tensors}
    if state.reference is not None:
        files[f"{TRAINER_FOLDER}/{REFERENCE_FILE}"] = state.reference
    return files


def read_trainer_state(checkpoint: Path, config: RunConfig, llama: nn.Module) -> TrainerState:
    """The state in a checkpoint, checked against config and model, its tensors as the model's.

    They are on the device of the parameters and sharded in the same way. A rank reads its parts
    alone, but a file of format 1 whole, by torch.load with `weights_only=True`.

    Raises:
        UserError: a file that is missing or malformed; numbers that the config's phases do not
            take; tensors of other names, shapes or dtypes than the model's parameters need.
    """
    folder = checkpoint / TRAINER_FOLDER
    trained = {name: each for name, each in llama.named_parameters() if each.requires_grad}
    moments = _optimizer_tensors(llama)
    if is_format_1(checkpoint):
        source = checkpoint / FORMAT_1_FILE
        values, optimizer, reference = _read_format_1(source, llama)
        optimizer = _parts_of(source, optimizer, moments) if optimizer else {}
        if reference is not None:
            reference = _parts_of(source, reference, trained)
    else:
        source = folder / PROGRESS_FILE
        values = read_json(source)
        optimizer = _read_parts(folder / OPTIMIZER_FILE, moments, may_be_empty=True)
        has_reference = (folder / REFERENCE_FILE).exists()
        reference = _read_parts(folder / REFERENCE_FILE, trained) if has_reference else None
    progress = parse_config(_Progress, values, source=str(source))
    _check_progress(source, progress, config)
    numbers = {name: getattr(progress, name) for name in _Progress.model_fields}
    del numbers["format"]
    numbers["rewards"] = tuple(math.nan if r is None else r for r in progress.rewards)
    numbers["entropy_bonus"] = {
        n: bonus.model_dump() for n, bonus in progress.entropy_bonus.items()
    }
    return TrainerState(**numbers, optimizer=_by_parameter(optimizer), reference=reference)


def is_format_1(checkpoint: Path) -> bool:
    """Whether a folder is a checkpoint of format 1, which has no checksums."""
    return (checkpoint / FORMAT_1_FILE).is_file() and not (checkpoint / TRAINER_FOLDER).exists()


def trained_names(module: nn.Module) -> list[str]:
    """The names of the trainable parameters in the order of `build_optimizer`."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return [name for name, p in sorted(parameters, key=lambda named: named[1].ndim <= 1)]


def _optimizer_tensors(llama: nn.Module) -> dict[str, Tensor]:
    """What the tensors of an optimizer's state must be like, by their name in the file."""
    wanted: dict[str, Tensor] = {}
    for name, parameter in llama.named_parameters():
        if parameter.requires_grad:
            wanted |= {f"{name}.{part}": parameter for part in _OF_PARAMETER}
            wanted[f"{name}.{_STEP}"] = torch.empty((), dtype=torch.float32)
    return wanted


def _read_parts(
    file: Path, wanted: Mapping[str, Tensor], *, may_be_empty: bool = False
) -> dict[str, Tensor]:
    """The tensors of a file, of which each rank reads its parts, sharded as those of `wanted`."""
    found: dict[str, tuple[list[int], torch.dtype | str]]
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            if may_be_empty and not names:
                return {}
            views = {name: tensors.get_slice(name) for name in names}
            found = {
                name: (view.get_shape(), FLOAT_DTYPES.get(view.get_dtype(), view.get_dtype()))
                for name, view in views.items()
            }
            _check_tensors(file, found, wanted)
            return {
                name: with_layout_of(_copy(read_part(tensors, name, like)), like)
                for name, like in wanted.items()
            }
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: must be a safetensors file: {error}") from error


def _parts_of(
    file: Path, whole: Mapping[str, Any], wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Whole tensors, sharded as those of `wanted`."""
    found: dict[str, tuple[list[int], torch.dtype | str]] = {}
    for name, value in whole.items():
        is_tensor = isinstance(value, Tensor)
        found[name] = (list(value.shape), value.dtype) if is_tensor else ([], type(value).__name__)
    _check_tensors(file, found, wanted)
    return {
        name: with_layout_of(_copy(whole[name][local_part(like)]), like)
        for name, like in wanted.items()
    }


def _copy(part: Tensor) -> Tensor:
    """The part without what it is a view of: a mapped file, or a whole tensor."""
    return part.clone(memory_format=torch.contiguous_format)


def _by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    result: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, part = name.rpartition(".")
        result.setdefault(parameter, {})[part] = tensor
    return result


def _read_format_1(
    file: Path, llama: nn.Module
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """Numbers, optimizer's tensors by name and reference of a file of format 1."""
    try:
        values = torch.load(file, weights_only=True, map_location="cpu")
        optimizer, reference = values.pop("optimizer"), values.pop("reference")
        names = trained_names(llama)
        by_name = {names[index]: state for index, state in optimizer["state"].items()}
        moments = {
            f"{name}.{part}": tensor
            for name, state in by_name.items()
            for part, tensor in state.items()
        }
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
    elif phase.rollouts.type != "files":
        position = progress.phase_step * phase.rollouts.prompts_per_step
        _check_number(file, "position", progress.position, [position])


def _check_number(file: Path, name: str, value: int, allowed: Sequence[int]) -> None:
    if value not in allowed:
        bound = f"{allowed[0]}" if len(allowed) == 1 else f"from {allowed[0]} to {allowed[-1]}"
        raise UserError(f"{file}: `{name}` must be {bound} with the run's config, got {value}")


def _check_tensors(
    file: Path,
    found: Mapping[str, tuple[list[int], torch.dtype | str]],
    wanted: Mapping[str, Tensor],
) -> None:
    """Raises one error that lists what does not fit the model's parameters."""
    problems = [f"missing `{name}`" for name in wanted if name not in found]
    problems += [f"unexpected `{name}`" for name in found if name not in wanted]
    for name, expected in wanted.items():
        needed = (list(expected.shape), expected.dtype)
        if found.get(name, needed) != needed:
            shape, dtype = found[name]
            problems.append(
                f"`{name}` must have shape {needed[0]} and {needed[1]}, got {shape} and {dtype}"
            )
    refuse_misfits(file, "tensors", problems)
