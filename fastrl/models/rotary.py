"""Rotary position embedding of the reference Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fastrl.config.model import LlamaConfig
from fastrl.config.rope import DefaultRopeConfig, Llama3RopeConfig, YarnRopeConfig
from fastrl.functional.head.matmul import accumulation_dtype


def rope_frequencies(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The angle per position of each rotary pair, [head_dim / 2] in `dtype`.

        f_i = theta^(-2 i / head_dim)

    Llama-3 scaling and YaRN slow a share s_i of it by a factor,

        (1 - s_i) f_i + s_i f_i / factor

    Llama 3 by the turns n_i = C f_i / (2 pi) that the pair makes in the original context C:
    s_i = clamp((high_freq_factor - n_i) / (high_freq_factor - low_freq_factor), 0, 1). YaRN by the
    pair's number: s_i = clamp((i - a) / (b - a), 0, 1), with a and b the (rounded) numbers of the
    pairs that make `beta_fast` and `beta_slow` turns.

    References:
        RoFormer, arXiv 2104.09864; The Llama 3 Herd of Models, arXiv 2407.21783; the scaling is
        that of the code released with Llama 3.1; YaRN, arXiv 2309.00071.
    """
    rope, size = config.rope, config.head_dim
    exponent = torch.arange(0, size, 2, device=device).to(dtype) / size
    frequencies = 1.0 / rope.theta**exponent
    if isinstance(rope, DefaultRopeConfig):
        return frequencies
    if isinstance(rope, Llama3RopeConfig):
        turns = rope.original_max_position_embeddings / (2 * math.pi / frequencies)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        first, last = _yarn_range(rope, size)
        pair = torch.arange(size // 2, device=device).to(dtype)
        keep = 1 - (pair - first) / (last - first)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn_range(rope: YarnRopeConfig, head_dim: int) -> tuple[float, float]:
    """The numbers of the pairs between which YaRN's share rises from 0 to 1."""

    def pair(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001  # as transformers does


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
        if isinstance(config.rope, YarnRopeConfig):
            cos, sin = cos * config.rope.attention_factor, sin * config.rope.attention_factor
        return cls(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])

    def __call__(
        self,
        heads: Tensor,  # [T, heads, head_dim]
    ) -> Tensor:  # [T, heads, head_dim]
        """`heads` with pair (i, i + head_dim / 2) turned by the angle, and scaled under YaRN."""
        first, second = heads.chunk(2, -1)
        swapped = torch.cat((second, first), -1)
        return (heads * self.cos + swapped * self.sin).to(heads.dtype)
