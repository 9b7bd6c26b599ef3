"""Adapters of low rank on a model of transformers, by the peft package."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fastrl.config.base import UserError
from fastrl.config.transformers_model import LoraConfig
from fastrl.integrations.transformers.folder import ADAPTER_CONFIG_FILE
from fastrl.integrations.transformers.output_layer import Model

ADAPTER_FILE = "adapter_model.safetensors"
_NAME = "default"


def with_adapters(model: Model, config: LoraConfig, path: Path) -> Any:
    """PEFT's model around `model`, whose own weights are frozen.

    The adapters start as PEFT has them, A drawn by the seed of torch's global generator and B at
    zero, so that the policy is the model's.

    Args:
        model: with its weights.
        config: of the adapters.
        path: of the model's folder, for adapter_config.json.

    Raises:
        UserError: `target_modules` are not the model's.
    """
    modules = config.target_modules
    options = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
    try:
        adapted = peft.get_peft_model(model, options)
    except ValueError as error:
        raise UserError(f"`model.lora`: {error}") from error
    # Drawn again, whatever loading the model has drawn, and in the model's order: PEFT
    # takes layers in that of a set, which each process has another of.
    torch.manual_seed(torch.initial_seed())
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters(_NAME, init_lora_weights=True)
    options.base_model_name_or_path = str(path.resolve())
    return adapted


def load_adapters(model: Any, checkpoint: Path) -> None:
    """Copies the adapters of a checkpoint into the model.

    Raises:
        UserError: a file that is missing or malformed, or adapters of another model.
    """
    file = checkpoint / ADAPTER_FILE
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: must be a safetensors file of adapters: {error}") from error
    wanted = {name: tensor.shape for name, tensor in adapter_tensors(model).items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    if wanted != found:
        names = sorted(
            name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
        )
        raise UserError(f"{file}: must hold the adapters of `model.lora`, differs in {names[:5]}")
    peft.set_peft_model_state_dict(model, weights)


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapters' parameters by the names that PEFT's files have for them."""
    trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=trained, save_embedding_layers=False
    )
    return tensors


def adapter_config(model: Any) -> bytes:
    """The content of adapter_config.json."""
    config = model.peft_config[_NAME]
    config.inference_mode = True  # as PEFT writes it
    try:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            return (Path(folder) / ADAPTER_CONFIG_FILE).read_bytes()
    finally:
        config.inference_mode = False


class FrozenAdapters:
    """The adapters as they were, which take the place of those that are trained for a pass.

    No second copy of the model is needed; of adapters at their start it is the model without them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._trained = [(n, each) for n, each in module.named_parameters() if each.requires_grad]
        self._values = [(name, each.detach().clone()) for name, each in self._trained]

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._values

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the model be the policy as it was."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for (_, parameter), (_, value) in zip(self._trained, self._values, strict=True):
            current = parameter.clone()
            parameter.copy_(value)
            value.copy_(current)
