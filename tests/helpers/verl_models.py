"""Tiny random models of transformers, of the families that verl's fused forward is held to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

VOCABULARY = 61


@dataclass(frozen=True)
class Family:
    """A model type of transformers and what its config sets beside the sizes."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES = [
    Family("llama"),
    Family("qwen2"),
    Family("qwen3"),
    Family("mistral"),
    Family("gemma2", {"final_logit_softcapping": 2.0}),
    Family("cohere", {"logit_scale": 0.25}),
    Family("granite", {"logits_scaling": 5.0}),
    Family("phi"),
    Family("olmo2"),
    Family("hyperclovax", {"logits_scaling": 3.0}),
]


def make_model(family: Family) -> Any:
    """A model in float64, in evaluation mode, whose biases and norms are random as well."""
    import transformers

    config = transformers.AutoConfig.for_model(
        family.name,
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        **family.options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model
