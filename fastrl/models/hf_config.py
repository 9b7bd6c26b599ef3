"""Hugging Face's config.json of a Llama to and from `LlamaConfig`."""

from __future__ import annotations

from typing import Any

from fastrl.config import HeadOptions, LlamaConfig, UserError, parse_config
from fastrl.config.rope import Llama3RopeConfig

_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Defaults of transformers that differ from those of LlamaConfig.
_HF_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Options that change what the model computes and are not implemented, with the values at which
# they are off.
_UNSUPPORTED = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, 0.0, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
}
# Rope types, and the parameters of each beside `rope_theta`.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
# Options of the head that Hugging Face's Llama lacks: Gemma's name, Cohere's, and our own.
_HEAD_KEYS = {
    "final_logit_softcapping": "softcap",
    "logit_scale": "logit_scale",
    "lm_head_bias": "bias",
}


def llama_config_from_hf(
    hf: dict[str, Any], *, head: HeadOptions | None = None, source: str = "config.json"
) -> LlamaConfig:
    """The `LlamaConfig` of a parsed config.json.

    Rotary options are read in both spellings: `rope_theta` and `rope_scaling` beside the sizes, or
    all in `rope_parameters` (transformers 5). Keys that do not change the model are ignored.

    Args:
        hf: the parsed file.
        head: options of the head; `final_logit_softcapping`, `logit_scale` and `lm_head_bias` of
            the file, which `llama_config_to_hf` writes, take precedence.
        source: the origin of the values, for error messages.

    Raises:
        UserError: an option that is not supported, or values that make no Llama.
    """
    for name, accepted in _UNSUPPORTED.items():
        if name in hf and hf[name] not in accepted:
            raise UserError(f"{source}: `{name}` must be {accepted[0]!r}, got {hf[name]!r}")
    values: dict[str, Any] = dict(_HF_DEFAULTS)
    values |= {name: hf[name] for name in _SAME_NAME if name in hf}
    for name in ("num_key_value_heads", "head_dim"):
        if values.get(name) is None:
            values.pop(name, None)  # null: follows from the other sizes
    values["head"] = (head or HeadOptions()).model_dump()
    values["head"] |= {ours: hf[theirs] for theirs, ours in _HEAD_KEYS.items() if theirs in hf}
    values["rope"] = _rope_from_hf(hf, source)
    return parse_config(LlamaConfig, values, source=source)


def _rope_from_hf(hf: dict[str, Any], source: str) -> dict[str, Any]:
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    parameters = hf.get(name) or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{source}: `{name}` must be an object of parameters, got {parameters!r}")
    parameters = dict(parameters)
    theta = parameters.pop("rope_theta", hf.get("rope_theta", 10000.0))
    old_kind = parameters.pop("type", "default")
    kind = parameters.pop("rope_type", old_kind)
    rotated = parameters.pop("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UserError(f"{source}: `partial_rotary_factor` must be 1.0, got {rotated}")
    if kind not in _ROPE_KEYS:
        raise UserError(f"{source}: rope type must be 'default' or 'llama3', got {kind!r}")
    expected = _ROPE_KEYS[kind]
    if set(parameters) != set(expected):
        raise UserError(
            f"{source}: rope type {kind!r} takes {', '.join(expected) or 'no parameters'}, got "
            f"{', '.join(sorted(parameters)) or 'none'}"
        )
    return {"type": kind, "theta": theta} | parameters


def llama_config_to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a model, in the spellings of old and new transformers at once.

    Options of the head that Hugging Face's Llama lacks are written only where they are set, as
    `final_logit_softcapping`, `logit_scale` and `lm_head_bias`.

    Args:
        config: the model's.
        dtype: of the weights, such as "float32".
    """
    hf: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    hf |= {name: getattr(config, name) for name in _SAME_NAME}
    hf["vocab_size"] = config.padded_vocab_size or config.vocab_size
    rope = config.rope.model_dump()
    hf["rope_theta"] = rope.pop("theta")
    scaling = {"rope_type": rope.pop("type")} | rope
    if isinstance(config.rope, Llama3RopeConfig):
        hf["rope_scaling"] = scaling
    hf["rope_parameters"] = {"rope_theta": config.rope.theta} | scaling
    return hf | {
        theirs: getattr(config.head, ours)
        for theirs, ours in _HEAD_KEYS.items()
        if getattr(config.head, ours) != HeadOptions.model_fields[ours].default
    }
