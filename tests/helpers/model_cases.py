"""Tiny Llamas and packed documents, and the same model in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import Llama, LlamaConfig

VOCAB_SIZE = 29

# torch.compile imports and inspects parts of torch that warn, about nothing of ours.
COMPILES = pytest.mark.filterwarnings("ignore")

LLAMA3_ROPE = {
    "type": "llama3",
    "theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

YARN_ROPE = {
    "type": "yarn",
    "theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}


def tiny_config(**values: Any) -> LlamaConfig:
    """Two layers, grouped-query attention; large weights, so that attention is not uniform."""
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
    }
    return LlamaConfig.model_validate(defaults | values)


@dataclass(frozen=True)
class Case:
    """A model whose every option transformers has as well."""

    name: str
    values: dict[str, Any]

    def config(self) -> LlamaConfig:
        return tiny_config(**self.values)


PARITY_CASES = [
    Case("grouped_query", {}),
    Case("multi_query_tied", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    Case("multi_head_llama3", {"num_key_value_heads": 4, "rope": LLAMA3_ROPE}),
    Case("biases", {"attention_bias": True, "mlp_bias": True}),
    Case("wide_heads_llama3", {"head_dim": 16, "rope": LLAMA3_ROPE, "rms_norm_eps": 1e-3}),
    Case("narrow_heads", {"head_dim": 4, "rope": {"type": "default", "theta": 1e6}}),
    Case("yarn", {"head_dim": 16, "rope": YARN_ROPE}),
    Case("yarn_untruncated", {"head_dim": 32, "rope": YARN_ROPE | {"truncate": False}}),
    Case("mistral", {"architecture": "mistral", "sliding_window": 1000}),
    Case("mistral_whole", {"architecture": "mistral"}),
    Case("qwen2", {"architecture": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    Case("qwen3", {"architecture": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-3}),
    Case("qwen3_yarn_biases", {"architecture": "qwen3", "attention_bias": True, "rope": YARN_ROPE}),
]


def randomised(llama: Llama) -> Llama:
    """The model with norms and biases that differ from their constant start."""
    with torch.no_grad():
        for parameter in llama.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return llama


def random_documents(lengths: Sequence[int]) -> list[Tensor]:
    return [torch.randint(VOCAB_SIZE, (length,)) for length in lengths]


def packed(documents: Sequence[Tensor], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and document index, each [T]."""
    pieces = [*documents, torch.zeros(padding, dtype=torch.int64)]
    index = [*range(len(documents)), -1]
    return (
        torch.cat(pieces),
        torch.cat([torch.arange(len(piece)) for piece in pieces]),
        torch.cat([torch.full_like(p, i) for p, i in zip(pieces, index, strict=True)]),
    )
