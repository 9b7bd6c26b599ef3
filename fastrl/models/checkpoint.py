"""Llama folders as Hugging Face has them: config.json and safetensors, one file or several.

Nothing here needs transformers, which loads what is saved, and the other way round.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl.config import HeadOptions, LlamaConfig, UserError
from fastrl.models.hf_config import llama_config_from_hf, llama_config_to_hf
from fastrl.models.llama import Llama
from fastrl.parallel import ParallelGroups, local_part, whole_tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
# Old checkpoints store these constants; they follow from the config.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def load_llama(
    path: str | os.PathLike[str],
    *,
    head: HeadOptions | None = None,
    groups: ParallelGroups | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Llama:
    """The model of a Hugging Face folder.

    Args:
        path: the folder.
        head: losses and options of the head.
        groups: process groups of the head.
        device: of the parameters.
        dtype: of the parameters; the file's are cast to it. Default: torch's default dtype.

    Raises:
        UserError: as `read_llama_config` and `load_weights`.
    """
    llama = Llama(read_llama_config(path, head=head), groups, device="meta", dtype=dtype)
    llama.to_empty(device=torch.get_default_device() if device is None else device)
    load_weights(llama, path)
    return llama


def read_llama_config(
    path: str | os.PathLike[str], *, head: HeadOptions | None = None
) -> LlamaConfig:
    """The config of a Hugging Face folder, whose weights decide whether the head is tied.

    Where config.json says tied but the files hold a head that differs from the embedding, the
    result is untied, with a warning.

    Args:
        path: the folder.
        head: losses and options of the head; those in config.json take precedence.

    Raises:
        UserError: a missing or malformed file, an unsupported option, or an untied head without
            weights.
    """
    folder = Path(path)
    source = folder / CONFIG_FILE
    config = llama_config_from_hf(read_json(source), head=head, source=str(source))
    files = _weight_files(folder)
    if config.tie_word_embeddings and not _is_tied(files):
        warnings.warn(
            f"{source} says `tie_word_embeddings: true`, but the weights have a `{_HEAD}` that "
            "differs from the embedding; the model is built untied, with that head",
            stacklevel=2,
        )
        return config.model_copy(update={"tie_word_embeddings": False})
    if not config.tie_word_embeddings and _HEAD not in files:
        raise UserError(
            f"{folder}: no tensor `{_HEAD}`, which `tie_word_embeddings: false` in {CONFIG_FILE} "
            "needs; set it to true if the embedding is the head"
        )
    return config


@torch.no_grad()
def load_weights(llama: Llama, path: str | os.PathLike[str]) -> None:
    """Copies the weights of a Hugging Face folder into a model, casting to its dtype.

    The parameters, initialised or not, keep their storage. Each rank of a sharded model reads its
    own parts of the files.

    Raises:
        UserError: a missing or malformed file; tensors that are missing, unexpected, of another
            shape or not floating point; a head in the files that differs from the embedding when
            the model's head is tied. Nothing has been copied then.
    """
    folder = Path(path)
    files = _weight_files(folder)
    parameters = dict(llama.named_parameters())  # a tied head is not listed a second time
    if _HEAD not in parameters:
        if not _is_tied(files):
            raise UserError(
                f"{folder}: `{_HEAD}` differs from the embedding, but the model's head is tied; "
                "build it with `tie_word_embeddings: false`"
            )
        files.pop(_HEAD, None)
    _check_tensors(folder, files, parameters)
    for file in sorted(set(files.values())):
        with _opened(file) as tensors:
            for name in (name for name, holder in files.items() if holder == file):
                parameter = parameters[name]
                part = read_part(tensors, name, parameter)
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(part)


def read_part(tensors: Any, name: str, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor of an open safetensors file, split as a parameter is.

    Nothing else of it is read. It may be a view of the file, which is mapped.
    """
    part: Tensor = tensors.get_slice(name)[local_part(parameter)]
    return part


def _check_tensors(
    folder: Path, files: dict[str, Path], parameters: dict[str, torch.nn.Parameter]
) -> None:
    """Raises one error that lists the tensors that do not fit."""
    problems = [f"missing `{name}`" for name in parameters if name not in files]
    problems += [f"unexpected `{name}`" for name in files if name not in parameters]
    for file in sorted(set(files.values())):
        with _opened(file) as tensors:
            for name in (name for name, holder in files.items() if holder == file):
                view = tensors.get_slice(name)
                shape, dtype = list(view.get_shape()), view.get_dtype()
                if name in parameters and shape != list(parameters[name].shape):
                    expected = list(parameters[name].shape)
                    problems.append(f"`{name}` must have shape {expected}, got {shape}")
                if name in parameters and dtype not in FLOAT_DTYPES:
                    problems.append(f"`{name}` must be of {', '.join(FLOAT_DTYPES)}, got {dtype}")
    refuse_misfits(folder, "weights", problems)


def _is_tied(files: dict[str, Path]) -> bool:
    """Whether the files hold no head, or one that equals the embedding."""
    if _HEAD not in files or _EMBEDDING not in files:
        return True
    return torch.equal(_read_tensor(files, _HEAD), _read_tensor(files, _EMBEDDING))


def _read_tensor(files: dict[str, Path], name: str) -> Tensor:
    with _opened(files[name]) as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


def _opened(file: Path) -> Any:
    """A context manager of an open safetensors file."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except SafetensorError as error:
        raise UserError(f"{file}: must be a safetensors file: {error}") from error


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor of a folder, by the tensor's name."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists():
        files = dict.fromkeys(_tensor_names(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE)
    elif index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: must have a mapping `weight_map` of tensors to files")
        for file in weight_map.values():
            if not isinstance(file, str) or file in ("", ".", "..") or set(file) & {"/", "\\"}:
                raise UserError(f"{index}: must name files of its folder, names {file!r}")
        files = {name: folder / file for name, file in weight_map.items()}
        held = {file: set(_tensor_names(file)) for file in set(files.values())}
        lost = [name for name, file in files.items() if name not in held[file]]
        if lost:
            raise UserError(f"{index}: `{lost[0]}` must be in {files[lost[0]].name}, but is not")
    else:
        raise UserError(f"{folder}: must hold {WEIGHTS_FILE} or {INDEX_FILE}, found neither")
    return {name: file for name, file in files.items() if not name.endswith(_IGNORED_SUFFIX)}


def _tensor_names(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return sorted(tensors.keys())


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


def refuse_misfits(source: Path, what: str, problems: Sequence[str]) -> None:
    """Raises one error that lists the first of the problems of tensors, if there are any."""
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise UserError(f"{source}: the {what} do not fit the model:\n{shown}{more}")


def save_llama(
    llama: Llama,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    writes: bool = True,
) -> None:
    """Writes a Hugging Face folder, which appears complete or not at all.

    A tied head is stored once, as the embedding. With more than `max_shard_bytes` of weights there
    are several safetensors files and an index.

    Args:
        llama: on any device; all ranks of a sharded model must call it.
        path: the folder, which must not exist; its parents are made.
        max_shard_bytes: most bytes of tensors in one file (one tensor may have more).
        writes: whether this rank writes; the others only contribute their shards.

    Raises:
        UserError: the folder exists.
        OSError: it cannot be written.
    """
    if not writes:
        for parameter in llama.parameters():
            whole_tensor(parameter.detach())
        return
    folder = Path(path)
    if folder.exists():
        raise UserError(f"{folder}: exists already; save to a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.tmp")
    if temporary.exists():  # left by a run that was killed
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        _write_folder(llama, temporary, max_shard_bytes)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _write_folder(llama: Llama, folder: Path, max_shard_bytes: int) -> None:
    parameters = dict(llama.named_parameters())
    files = weight_files(parameters, max_shard_bytes)
    for file, held in by_file(parameters, files).items():
        tensors = {
            name: whole_tensor(parameter.detach()).cpu().contiguous()
            for name, parameter in held.items()
        }
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # an error of the file system
            raise OSError(f"{folder / file}: {error}") from error
    for file, content in json_files(llama, files).items():
        (folder / file).write_bytes(content)


def weight_files(
    tensors: Mapping[str, Tensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, str]:
    """The file of each tensor in a Hugging Face folder, by the tensor's name."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        used = sum(sizes[other] for other in shards[-1])
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        files |= dict.fromkeys(names, file if len(shards) > 1 else WEIGHTS_FILE)
    return files


def by_file(
    tensors: Mapping[str, Tensor], files: Mapping[str, str]
) -> dict[str, dict[str, Tensor]]:
    """The tensors of each of `weight_files`, by name."""
    held: dict[str, dict[str, Tensor]] = {file: {} for file in files.values()}
    for name, tensor in tensors.items():
        held[files[name]][name] = tensor
    return held


def json_files(llama: Llama, files: Mapping[str, str]) -> dict[str, bytes]:
    """config.json and, where there are several `weight_files`, their index: contents by name."""
    parameters = dict(llama.named_parameters())
    dtype = str(parameters[_EMBEDDING].dtype).removeprefix("torch.")
    return {
        CONFIG_FILE: _json(llama_config_to_hf(llama.config, dtype)),
        **index_files(parameters, files),
    }


def index_files(tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> dict[str, bytes]:
    """The index of several `weight_files`; none of one."""
    if len(set(files.values())) == 1:
        return {}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {INDEX_FILE: _json({"metadata": {"total_size": total}, "weight_map": dict(files)})}


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()
