"""Sizes that determine memory and communication: tokens, elements and parameters of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastrl.config.model import LlamaConfig
from fastrl.config.training import ParallelConfig


@dataclass(frozen=True)
class Shapes:
    """Sizes of one rank's work.

    Attributes:
        tokens: of the packed sequence, over all its sequence-data ranks.
        local: tokens on this rank, all pieces.
        piece: tokens on this rank in one piece.
        stream: rows of the residual stream on this rank in one piece.
        dtype: of activations and gathered weights.
        stored: bytes of an element of parameters, gradient sums and optimizer states.
        shards: ranks over which FSDP2 shards parameters, 1 without it.
    """

    tokens: int
    local: int
    piece: int
    stream: int
    dtype: torch.dtype
    stored: int
    shards: int

    @property
    def compute(self) -> int:
        """Bytes of an element of activations and gathered weights."""
        return self.dtype.itemsize

    @classmethod
    def of(cls, parallel: ParallelConfig, tokens: int, dtype: str) -> Shapes:
        """The sizes for packed sequences of `tokens` tokens and parameters of `dtype`."""
        local = -(-tokens // parallel.sequence_data)
        piece = -(-local // parallel.micro_sequences)
        return cls(
            tokens=tokens,
            local=local,
            piece=piece,
            stream=piece // (parallel.tensor if parallel.sequence_parallel else 1),
            dtype=getattr(torch, parallel.compute_dtype or dtype),
            stored=getattr(torch, dtype).itemsize,
            shards=parallel.data * parallel.sequence_data if parallel.fully_sharded else 1,
        )


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters on one tensor rank."""

    layer: int
    mlp_matrix: int
    embedding: int
    norm: int
    head: int  # its bias alone where it is tied to the embedding
    num_layers: int
    is_tied: bool

    @classmethod
    def of(cls, model: LlamaConfig, tensor: int) -> Weights:
        """The parameters of a model with `tensor` ranks."""
        size, heads = model.hidden_size, model.num_attention_heads * model.head_dim
        key_value = model.num_key_value_heads * model.head_dim
        sharded = size * (2 * heads + 2 * key_value + 3 * model.intermediate_size)
        whole = 2 * size
        if model.attention_bias:
            sharded += heads + 2 * key_value
        if model.attention_output_bias:
            whole += size
        if model.qk_norm:
            whole += 2 * model.head_dim
        if model.mlp_bias:
            sharded, whole = sharded + 2 * model.intermediate_size, whole + size
        rows = model.padded_vocab_size or model.vocab_size
        assert rows is not None
        shard = -(-rows // tensor)
        head = shard if model.head.vocabulary_parallel else rows
        is_tied = model.tie_word_embeddings
        return cls(
            layer=sharded // tensor + whole,
            mlp_matrix=size * model.intermediate_size // tensor,
            embedding=size * (head if is_tied else shard),
            norm=size,
            head=(0 if is_tied else size * head) + (head if model.head.bias else 0),
            num_layers=model.num_hidden_layers,
            is_tied=is_tied,
        )

    @property
    def root(self) -> int:
        """Embedding, final norm and head."""
        return self.embedding + self.norm + self.head

    @property
    def total(self) -> int:
        return self.layer * self.num_layers + self.root
