"""Tiny random models of the families of Hugging Face transformers.

`python -m tests.helpers.hf_models` prints how the probe gives each its documents, as the table of
docs/integrations.md.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from fastrl.integrations.transformers import attach_head, packing_of

VOCAB_SIZE = 96

# By the names that configs have for them; a config takes those that it has.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 128,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "d_model": 32,
    "rotary_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
}

# What a family's config has beside the sizes.
CAUSAL: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "deepseek_v3": {**_LATENT_ATTENTION, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "diffllama": {},
    "doge": {},
    "ernie4_5": {},
    "exaone4": {},
    "falcon": {},
    "falcon_h1": {
        "lm_head_multiplier": 0.4,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "falcon_mamba": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "glm": {},
    "glm4_moe": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {},
    "granite": {"logits_scaling": 3.0},
    "granitemoe": {"logits_scaling": 3.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hyperclovax": {"logits_scaling": 0.3},
    "jamba": {},
    "jetmoe": {},
    "lfm2": {},
    "llama": {},
    "mamba": {},
    "minicpm3": {**_LATENT_ATTENTION, "dim_model_base": 10},
    "minimax": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {},
    "mpt": {},
    "nanochat": {"final_logit_softcapping": 2.0},
    "nemotron": {},
    "nemotron_h": {
        "layer_types": ["mamba", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "olmo": {},
    "olmo2": {},
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": _LINEAR_ATTENTION,
    "recurrent_gemma": {"logits_soft_cap": 2.0},
    "rwkv": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "xlstm": {"output_logit_soft_cap": 2.0},
}

# What follows a token changes its distribution.
NOT_CAUSAL = ("bert", "cpmant", "prophetnet", "roberta", "xlm")

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# The language part of vision-language models; text alone.
VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": _VISION},
    "llava": {
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "text_config": {"model_type": "llama"},
    },
    "qwen2_5_vl": {
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2},
        "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    },
}


def tiny_config(family: str, **changes: Any) -> Any:
    """A config of two layers and width 32."""
    if family in VISION_LANGUAGE:
        own = {name: dict(part) for name, part in VISION_LANGUAGE[family].items()}
        text = own.pop("text_config", {})
        kind = type(AutoConfig.for_model(family).get_text_config())
        if "model_type" in text:
            sized = _sizes(text["model_type"])
        else:
            sized = {name: value for name, value in _SIZES.items() if hasattr(kind(), name)}
        return AutoConfig.for_model(family, text_config=sized | text | changes, **own)
    return AutoConfig.for_model(family, **_sizes(family) | CAUSAL.get(family, {}) | changes)


def _sizes(family: str) -> dict[str, Any]:
    default = AutoConfig.for_model(family)
    aliases = default.attribute_map
    names = {name for name in _SIZES if hasattr(default, name)}
    names -= {name for name in names if isinstance(getattr(type(default), name, None), property)}
    # Of a size and its alias, the one that the config stores.
    return {name: _SIZES[name] for name in names if aliases.get(name) not in names}


def tiny_model(family: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model in evaluation mode whose every parameter is random, biases and norms too."""
    config = tiny_config(family, **changes)
    for each in (config, config.get_text_config()):
        each._experts_implementation = "eager"  # the others know no float64
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if family in VISION_LANGUAGE else AutoModelForCausalLM
    model: Any = kind.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def layout(family: str) -> str:
    """How the probe gives a family its documents: `packed`, `padded` or `refused`."""
    model = tiny_model(family)
    try:
        attach_head(model, {})
    except ValueError:
        return "refused"
    return packing_of(model)


def table() -> str:
    """The table of docs/integrations.md."""
    families = sorted([*CAUSAL, *VISION_LANGUAGE, *NOT_CAUSAL])
    found = {family: layout(family) for family in families}
    lines = ["| documents | families |", "|---|---|"]
    for each in ("packed", "padded", "refused"):
        names = [f"`{family}`" for family in families if found[family] == each]
        lines.append(f"| {each} ({len(names)}) | {', '.join(names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
