"""`fastrl export`: the model of a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastrl.config.base import UserError
from fastrl.models.checkpoint import CONFIG_FILE, INDEX_FILE
from fastrl.training.checkpoint import (
    latest_checkpoint,
    named_checkpoint,
    sync_folder,
    sync_one,
)
from fastrl.training.display import print_line
from fastrl.training.manifest import MANIFEST_FILE
from fastrl.training.trainer_state import FORMAT_1_FILE, TRAINER_FOLDER

_NOT_OF_THE_MODEL = (TRAINER_FOLDER, FORMAT_1_FILE, MANIFEST_FILE)


def export(
    run_dir: Path, folder: Path, *, checkpoint: str | None = None, dtype: str | None = None
) -> int:
    """Writes the model of a run as a Hugging Face folder; the exit code is 0.

    The folder appears complete or not at all. Files of weights are read and written one at a time.

    Args:
        run_dir: folder of the run.
        folder: to write, which must not exist; its parents are made.
        checkpoint: name of a checkpoint of the run; default: the latest.
        dtype: of the weights, such as "bfloat16"; default: as they are.

    Raises:
        UserError: no such run or checkpoint, one that its manifest does not fit, a folder that
            exists, or a weight that is not finite in `dtype`. Nothing has been written then.
        OSError: the folder cannot be written; nothing is left of it.
    """
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder}: exists already; export to a new folder")
    if checkpoint is None:
        source = latest_checkpoint(run_dir)
    else:
        source = named_checkpoint(run_dir, checkpoint)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    temporary.mkdir()
    try:
        dtypes, numbers = _write(source, temporary, dtype)
        sync_folder(temporary)
        temporary.rename(folder)
        sync_one(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    how = "as in the checkpoint" if dtype is None else "as asked"
    print_line(
        Console(),
        f"{source.name} -> {folder}: {numbers:,} weights in {', '.join(sorted(dtypes))} ({how})",
    )
    return 0


def _write(source: Path, folder: Path, dtype: str | None) -> tuple[set[str], int]:
    """Writes the files of the model; the dtypes and the number of its weights."""
    dtypes: set[str] = set()
    numbers = num_bytes = 0
    for file in _files(source):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target)
            continue
        tensors = _tensors(file, dtype)
        dtypes |= {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
        numbers += sum(tensor.numel() for tensor in tensors.values())
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        _save(tensors, target)
    if dtype is not None:
        _update(folder / CONFIG_FILE, {"dtype": dtype, "torch_dtype": dtype})
    if (folder / INDEX_FILE).is_file():
        _update(folder / INDEX_FILE, {"metadata": {"total_size": num_bytes}})
    return dtypes, numbers


def _files(source: Path) -> list[Path]:
    """The files of a checkpoint that belong to the model."""
    found = []
    for path in sorted(source.rglob("*")):
        parts = path.relative_to(source).parts
        is_shown = parts[0] not in _NOT_OF_THE_MODEL and not parts[-1].startswith(".")
        if path.is_file() and is_shown:
            found.append(path)
    return found


def _tensors(file: Path, dtype: str | None) -> dict[str, Tensor]:
    """The tensors of a file, those of floating point cast to `dtype` one by one."""
    tensors: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118, it is no mapping
            tensor: Tensor = opened.get_tensor(name)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(getattr(torch, dtype))
                if not bool(tensor.isfinite().all()):
                    raise UserError(
                        f"{file}: `{name}` has values that are not finite in {dtype}; choose "
                        "another --dtype"
                    )
            tensors[name] = tensor
    return tensors


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # an error of the file system
        raise OSError(f"{file}: {error}") from error


def _update(file: Path, changes: dict[str, Any]) -> None:
    """Writes values into a JSON file, in place of those of the same names."""
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
