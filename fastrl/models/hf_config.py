"""Hugging Face's config.json of a Llama, Mistral, Qwen2 or Qwen3 to and from `LlamaConfig`."""

from __future__ import annotations

from typing import Any

from fastrl.config import HeadOptions, LlamaConfig, UserError, parse_config
from fastrl.config.model import FIXED_OPTIONS, Architecture
from fastrl.config.rope import DefaultRopeConfig

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
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Options of the models of transformers whose architecture leaves them open.
_BIASES = ("attention_bias", "mlp_bias")
_CLASSES: dict[Architecture, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
MODEL_TYPES: tuple[str, ...] = tuple(_CLASSES)
"""What `model_type` of a config.json may be."""

# Defaults of transformers that differ from those of LlamaConfig.
_COMMON_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
_QWEN_DEFAULTS = _COMMON_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
_HF_DEFAULTS: dict[Architecture, dict[str, Any]] = {
    "llama": _COMMON_DEFAULTS
    | {"vocab_size": 32000, "intermediate_size": 11008, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": _COMMON_DEFAULTS
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": _QWEN_DEFAULTS | {"head_dim": 128},
}
# The window of Mistral, Qwen2 and Qwen3 where config.json has no number.
_HF_SLIDING_WINDOW = 4096
# Options that change what the model computes and are not implemented, with the values at which
# they are off.
_UNSUPPORTED = {
    "model_type": MODEL_TYPES,
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, 0.0, None),
    "quantization_config": (None,),
}
# Rope types, and the parameters of each beside `rope_theta`: those that must be given, and others.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "llama3": (
        (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        (),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
        ),
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
            wanted = repr(accepted[0])
            if name == "model_type":
                wanted = f"one of {', '.join(map(repr, accepted))}"
            raise UserError(f"{source}: `{name}` must be {wanted}, got {hf[name]!r}")
    architecture: Architecture = hf.get("model_type", "llama")
    values: dict[str, Any] = {"architecture": architecture} | _HF_DEFAULTS[architecture]
    values |= {name: hf[name] for name in _same_names(architecture) if name in hf}
    values["sliding_window"] = _window_from_hf(hf, architecture, source)
    for name in ("num_key_value_heads", "head_dim"):
        if values.get(name) is None:
            values.pop(name, None)  # null: follows from the other sizes
    values["head"] = (head or HeadOptions()).model_dump()
    values["head"] |= {ours: hf[theirs] for theirs, ours in _HEAD_KEYS.items() if theirs in hf}
    values["rope"] = _rope_from_hf(hf, source)
    return parse_config(LlamaConfig, values, source=source)


def _same_names(architecture: Architecture) -> list[str]:
    """The options that have one name in config.json and here."""
    fixed = FIXED_OPTIONS[architecture]
    return [*_SAME_NAME, *(name for name in _BIASES if name not in fixed)]


def _window_from_hf(hf: dict[str, Any], architecture: Architecture, source: str) -> int | None:
    """The sliding window that all layers have, None without one."""
    window: int | None = hf.get("sliding_window", _HF_SLIDING_WINDOW)
    if architecture == "llama":
        if hf.get("sliding_window") is not None:
            raise UserError(f"{source}: `sliding_window` must be None in a Llama, got {window!r}")
        return None
    if architecture == "mistral":
        return window
    if not hf.get("use_sliding_window", False):
        return None
    layers = hf.get("num_hidden_layers", _COMMON_DEFAULTS["num_hidden_layers"])
    first = min(hf.get("max_window_layers", 28), layers)
    types = hf.get("layer_types") or ["full"] * first + ["sliding_attention"] * (layers - first)
    slide = [kind == "sliding_attention" for kind in types]
    if any(slide) and not all(slide):
        raise UserError(
            f"{source}: all layers must have the sliding window, or none, got {sum(slide)} of "
            f"{len(slide)} with it; set `use_sliding_window` to false for documents within "
            f"{window} tokens"
        )
    return window if any(slide) else None


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
        kinds = ", ".join(repr(name) for name in _ROPE_KEYS)
        raise UserError(f"{source}: rope type must be one of {kinds}, got {kind!r}")
    required, optional = _ROPE_KEYS[kind]
    # null stands for the default, as in transformers
    parameters = {key: value for key, value in parameters.items() if value is not None}
    if not set(required) <= set(parameters) <= {*required, *optional}:
        also = f" and, if it is to differ, {', '.join(optional)}" if optional else ""
        raise UserError(
            f"{source}: rope type {kind!r} takes {', '.join(required) or 'no parameters'}{also}, "
            f"got {', '.join(sorted(parameters)) or 'none'}"
        )
    if "original_max_position_embeddings" in optional:
        length = hf.get("max_position_embeddings", LlamaConfig().max_position_embeddings)
        parameters.setdefault("original_max_position_embeddings", length)
    return {"type": kind, "theta": theta} | parameters


def llama_config_to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a model, in the spellings of old and new transformers at once.

    Options of the head that Hugging Face's Llama lacks are written only where they are set, as
    `final_logit_softcapping`, `logit_scale` and `lm_head_bias`.

    Args:
        config: the model's.
        dtype: of the weights, such as "float32".
    """
    architecture, window = config.architecture, config.sliding_window
    hf: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    hf |= {name: getattr(config, name) for name in _same_names(architecture)}
    if architecture != "llama":
        hf["sliding_window"] = window
    if architecture in ("qwen2", "qwen3"):
        hf |= {"use_sliding_window": window is not None, "max_window_layers": 0}
    hf["vocab_size"] = config.padded_vocab_size or config.vocab_size
    rope = config.rope.model_dump()
    hf["rope_theta"] = rope.pop("theta")
    scaling = {"rope_type": rope.pop("type")} | rope
    if not isinstance(config.rope, DefaultRopeConfig):
        hf["rope_scaling"] = scaling
    hf["rope_parameters"] = {"rope_theta": config.rope.theta} | scaling
    return hf | {
        theirs: getattr(config.head, ours)
        for theirs, ours in _HEAD_KEYS.items()
        if getattr(config.head, ours) != HeadOptions.model_fields[ours].default
    }
