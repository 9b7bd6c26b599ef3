"""Rotary position embedding of the reference Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fastrl.config.model import LlamaConfig
from fastrl.config.rope import Llama3RopeConfig
from fastrl.functional.head.matmul import accumulation_dtype


def rope_frequencies(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The angle per position of each rotary pair, [head_dim / 2] in `dtype`.

        f_i = theta^(-2 i / head_dim)

    and with Llama-3 scaling, by wavelength w_i = 2 pi / f_i and original context length C:
    f_i where w_i < C / high_freq_factor, f_i / factor where w_i > C / low_freq_factor, between them
    (1 - s) f_i / factor + s f_i, s = (C / w_i - low_freq_factor) / (high_freq_factor -
    low_freq_factor).

    References:
        RoFormer, arXiv 2104.09864; The Llama 3 Herd of Models, arXiv 2407.21783; the scaling is
        that of the code released with Llama 3.1.
    """
    rope = config.rope
    exponent = torch.arange(0, config.head_dim, 2, device=device).to(dtype) / config.head_dim
    frequencies = 1.0 / rope.theta**exponent
    if isinstance(rope, Llama3RopeConfig):
        turns = rope.original_max_position_embeddings / (2 * math.pi / frequencies)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        frequencies = (1 - keep) * frequencies / rope.factor + keep * frequencies
    return frequencies


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding of given positions, made once per forward for all layers.

    One object rather than two tensor arguments of the layers: mixed-precision wrappers cast tensor
    arguments, and the angles must stay in fp32. It is hashed by identity (`eq=False`), as what a
    layer calls must be for torch.compile, which hashes it before it has fields.
    """

    cos: Tensor  # [T, 1, head_dim], at least fp32
    sin: Tensor  # [T, 1, head_dim], negative in the first half

    @classmethod
    def of(
        cls,
        positions: Tensor,  # [T]
        config: LlamaConfig,
        dtype: torch.dtype,
    ) -> Self:
        """The rotary embedding of `positions` for a model that computes in `dtype`."""
        dtype = accumulation_dtype(dtype)
        angles = positions[:, None].to(dtype) * rope_frequencies(config, positions.device, dtype)
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])

    def __call__(
        self,
        heads: Tensor,  # [T, heads, head_dim]
    ) -> Tensor:  # [T, heads, head_dim]
        """`heads` with pair (i, i + head_dim / 2) turned by the position's angle."""
        first, second = heads.chunk(2, -1)
        swapped = torch.cat((second, first), -1)
        return (heads * self.cos + swapped * self.sin).to(heads.dtype)
