"""Sampling from models of transformers: a cache with all slots from the start gives the same."""

from __future__ import annotations

import pytest
import torch

from fastrl.config.environment import SamplerConfig
from fastrl.config.training import ParallelConfig
from fastrl.integrations.transformers.decoding import (
    TransformersDecoder,
    check_decoding,
    may_be_static,
)
from fastrl.training.draws import Completion
from fastrl.training.processes import Processes
from fastrl.training.sampler import Sampler
from tests.helpers.hf_models import VOCAB_SIZE, tiny_model

PROMPTS = [[5, 12, 3], [7], [1, 2, 3, 4, 5, 6, 7], [9, 9]]


def _completions(family: str, is_static: bool) -> list[Completion]:
    torch.manual_seed(0)
    model = tiny_model(family, dtype=torch.float64).eval()
    assert may_be_static(model)
    processes = Processes(ParallelConfig(), 0, torch.device("cpu"), None)
    decoder = TransformersDecoder(model, is_static=is_static)
    config = SamplerConfig(max_new_tokens=30)
    ends = range(0, VOCAB_SIZE, 12)
    sampler = Sampler(config, decoder, ends, torch.Generator(), processes)
    return [each for group in sampler.sample(PROMPTS, num_each=3, temperature=0) for each in group]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_static_cache_draws_the_same(family: str) -> None:
    expected, found = (_completions(family, is_static) for is_static in (False, True))
    for completion, other in zip(found, expected, strict=True):
        assert completion.tokens == other.tokens
        assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_which_models_have_one() -> None:
    # A sliding window's layers branch on the length, which a CUDA graph would not.
    assert not may_be_static(tiny_model("gemma3_text"))
    assert check_decoding(tiny_model("llama").eval(), VOCAB_SIZE) is False  # on the CPU
