"""Decoder layers of a model of transformers under torch.compile."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import Cache


class _CompiledForward:
    """The forward of a layer: compiled, but as it is where it writes to a cache of a sampler.

    Steps of a sampler are short, and each grows its cache: graphs of them would be many.
    """

    def __init__(self, layer: nn.Module, options: dict[str, Any]) -> None:
        self._layer, self._own, self._options = layer, type(layer).forward, options
        self._compiled = torch.compile(self._own, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        has_cache = any(isinstance(each, Cache) for each in (*args, *kwargs.values()))
        forward = self._own if has_cache else self._compiled
        return forward(self._layer, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CompiledForward:
        """That of a copy of the model is of the copy's layer."""
        return _CompiledForward(deepcopy(self._layer, memo), self._options)


def compile_layers(layers: Iterable[nn.Module], **options: Any) -> None:
    """Compiles the forward of each layer in place, as `fastrl.models.compiled` a Llama's.

    What is compiled is a function of the layer's class, which layers share; names of parameters
    stay. Shard after this.

    Args:
        layers: of the model, whose forward is that of their class.
        options: of `torch.compile`.
    """
    for layer in layers:
        layer.forward = _CompiledForward(layer, options)
