"""Decoder layers under torch.compile: one graph for all layers, for any number of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compile_layers(layers: nn.ModuleList, **options: Any) -> None:
    """Compiles the forward of each layer in place; names of parameters stay.

    Layers of one class share what is compiled: the first call of the first layer compiles for its
    number of tokens, the first other number for all. What runs around a layer (hooks of FSDP2,
    activation checkpointing of whole layers) stays eager, so shard and wrap after this.

    Args:
        layers: alike but for their weights, such as `llama.model.layers`.
        options: of `torch.compile`.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, **options)
