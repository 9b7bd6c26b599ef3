"""PEFT's layers around an output layer."""

from __future__ import annotations

from typing import Any

import peft
from torch import nn


def lora_layer(base: nn.Linear, **options: Any) -> Any:
    """PEFT's LoRA layer around `base`, of its dtype, with random A and B."""
    arguments: dict[str, Any] = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, **options}
    config = peft.LoraConfig(target_modules=["0"], **arguments)
    model: Any = nn.Sequential(base)
    layer: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return layer.base_model.model[0].to(base.weight.dtype)
