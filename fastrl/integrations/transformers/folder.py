"""The folder of a model of transformers, read without running code of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from fastrl.config.base import UserError
from fastrl.integrations.transformers.output_layer import Model
from fastrl.models.checkpoint import CONFIG_FILE, by_file, index_files, read_json, weight_files
from fastrl.parallel import whole_tensor
from fastrl.training.model import ModelFiles
from fastrl.training.tokenizer_folder import GENERATION_CONFIG_FILE

ADAPTER_CONFIG_FILE = "adapter_config.json"
# Of transformers' loaders: no download, no code of the folder.
_NOTHING_ELSE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# The weights in the dtype of training, where that of the folder has fewer bits.
MASTER_FILE = "trainer/weights.safetensors"


def load_folder(folder: Path, dtype: torch.dtype) -> Model:
    """The model of a folder in evaluation mode, in `dtype`, on the CPU.

    Raises:
        UserError: no such folder or model; weights that are missing, of another shape or that the
            model does not have; a quantised model, code of its own, or adapters without weights.
    """
    _check_folder(folder)
    logging.disable_progress_bar()
    loader: Any = AutoModelForCausalLM
    with _errors_of(folder):
        model, info = loader.from_pretrained(
            folder,
            config=AutoConfig.from_pretrained(folder, **_NOTHING_ELSE),
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **_NOTHING_ELSE,
        )
    found = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if found:
        shown = "; ".join(f"{kind} {names[:5]}" for kind, names in found.items())
        raise UserError(
            f"{folder}: the weights must be those of {type(model).__name__}, but there are {shown}"
        )
    return model.eval()


def empty_model(folder: Path) -> Model:
    """The model of a folder without its weights, on the meta device.

    Raises:
        UserError: as `load_folder`, but for the weights.
    """
    _check_folder(folder)
    loader: Any = AutoModelForCausalLM
    with _errors_of(folder), torch.device("meta"):
        model: Model = loader.from_config(AutoConfig.from_pretrained(folder, **_NOTHING_ELSE))
    return model


def _check_folder(folder: Path) -> None:
    """Refuses what transformers would ask about, or would do otherwise than a run needs."""
    if not folder.is_dir():
        raise UserError(f"{folder}: must be the folder of a model, there is no such folder")
    if (folder / ADAPTER_CONFIG_FILE).exists():
        raise UserError(
            f"{folder}: must hold a whole model, holds adapters of another one; merge them first"
            " (`AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()`), and save that"
        )
    config = read_json(folder / CONFIG_FILE)
    if "quantization_config" in config:
        raise UserError(
            f"{folder / CONFIG_FILE}: `quantization_config` must not be there, as quantised weights"
            " are not trained; take the folder of the model that was quantised"
        )
    if "auto_map" in config:
        raise UserError(
            f"{folder / CONFIG_FILE}: `auto_map` must not be there: it names code of the folder,"
            " which is not run; transformers must have the model itself"
        )


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: transformers cannot load the model: {_line(error)}") from error


def _line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300]


class ModelFolder:
    """What a checkpoint takes from the folder that a model came from: its config and its dtype.

    Args:
        folder: of the model.
        dtype: of training.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        config = read_json(folder / CONFIG_FILE)
        name = config.get("dtype", config.get("torch_dtype"))
        named = getattr(torch, name, None) if isinstance(name, str) else None
        self.dtype: torch.dtype = named if isinstance(named, torch.dtype) else dtype
        self._config_file = (folder / CONFIG_FILE).read_bytes()
        self._end = config.get("eos_token_id")
        self._has_generation_file = (folder / GENERATION_CONFIG_FILE).exists()

    def files(self, model: Model) -> ModelFiles:
        """The folder of a model as others load it; all ranks of a sharded model must call."""
        parameters = {name: each.detach() for name, each in model.named_parameters()}
        stored = {name: tensor.to(self.dtype) for name, tensor in parameters.items()}
        stored |= persistent_buffers(model)
        if not _stores_as_is(model, list(stored)):
            whole = {name: whole_tensor(tensor).cpu() for name, tensor in stored.items()}
            stored = revert_weight_conversion(model, whole)
        holders = weight_files(stored)
        tensors = by_file(stored, holders)
        if any(tensor.dtype != self.dtype for tensor in parameters.values()):
            tensors[MASTER_FILE] = parameters
        contents = {CONFIG_FILE: self._config_file, **index_files(stored, holders)}
        return ModelFiles(tensors, contents)

    def contents_beside_adapters(self) -> dict[str, bytes]:
        """What adapters need of the folder: the end tokens, if config.json alone names them.

        No config.json: transformers would take the folder for that of a whole model.
        """
        if self._has_generation_file or self._end is None:
            return {}
        return {GENERATION_CONFIG_FILE: json.dumps({"eos_token_id": self._end}).encode()}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """What a folder has beside the parameters."""
    names = {name for name, _ in module.named_buffers()}
    return {name: tensor for name, tensor in module.state_dict().items() if name in names}


def _stores_as_is(model: Model, names: list[str]) -> bool:
    """Whether a folder has tensors of these names as the model computes with them."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    patterns = [pattern for each in conversions or () for pattern in each.target_patterns]
    return not any(re.search(pattern, name) for pattern in patterns for name in names)


@torch.no_grad()
def load_masters(module: nn.Module, folder: Path) -> None:
    """Copies the weights of `MASTER_FILE` into a model, if a checkpoint has that file.

    Raises:
        UserError: they are not those of the model.
    """
    from safetensors.torch import load_file

    file = folder / MASTER_FILE
    if not file.exists():
        return
    weights = load_file(file)
    parameters = dict(module.named_parameters())
    wrong = [
        name
        for name in parameters.keys() | weights.keys()
        if name not in parameters
        or name not in weights
        or weights[name].shape != parameters[name].shape
    ]
    if wrong:
        raise UserError(
            f"{file}: must hold the model's parameters, but not so: {sorted(wrong)[:5]}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
