"""Sampling by CUDA graphs: the tokens of the same steps one by one, of the weights as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastrl import Document, Llama, TokenBatch
from fastrl.config.base import UserError
from fastrl.config.environment import SamplerConfig
from fastrl.config.training import ParallelConfig
from fastrl.integrations.transformers.decoding import (
    TransformersDecoder,
    check_decoding,
    may_be_static,
)
from fastrl.training import sampler as sampler_module
from fastrl.training.cuda_graph import repeated
from fastrl.training.draws import Completion
from fastrl.training.llama_model import LlamaDecoder
from fastrl.training.model import Decoder
from fastrl.training.processes import Processes
from fastrl.training.sampler import Sampler
from tests.helpers.hf_models import VOCAB_SIZE, tiny_model
from tests.helpers.model_cases import LLAMA3_ROPE, randomised, tiny_config

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 12, 3], [7], [1, 2, 3, 4, 5, 6, 7], [9, 9]]
LENGTH = 60


def new_llama(dtype: torch.dtype, **values: Any) -> Llama:
    config = tiny_config(
        **{"hidden_size": 64, "head_dim": 32, "vocab_size": 300, "rope": LLAMA3_ROPE} | values
    )
    return randomised(Llama(config, dtype=dtype)).cuda().eval()


def new_processes() -> Processes:
    device = torch.device("cuda", torch.cuda.current_device())
    return Processes(ParallelConfig(), 0, device, None)


def new_sampler(llama: Llama, block_size: int | None = None) -> Sampler:
    return sampler_of(LlamaDecoder(llama, new_processes(), block_size=block_size))


def sampler_of(decoder: Decoder, ends: Sequence[int] = range(0, 300, 40)) -> Sampler:
    processes = new_processes()
    generator = torch.Generator(processes.device)
    generator.manual_seed(1)
    config = SamplerConfig(max_new_tokens=LENGTH, max_batch_size=64)
    return Sampler(config, decoder, ends, generator, processes)


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


@contextmanager
def one_by_one(
    step: Callable[[], None], generator: torch.Generator
) -> Iterator[Callable[[], None]]:
    """In place of a graph: the same step, launched each time."""
    yield step


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("block_size", [None, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_draws_what_its_steps_draw(
    temperature: float, block_size: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = new_llama(dtype)
    results = []
    for _ in range(2):
        sampler = new_sampler(llama, block_size)
        first = sampler.sample(PROMPTS, num_each=9, temperature=temperature, sum_squares=True)
        results.append([first, sampler.sample(PROMPTS[:1], num_each=64, temperature=temperature)])
        monkeypatch.setattr(sampler_module, "repeated", one_by_one)
    assert results[0] == results[1]
    completions = flat(results[0][0])
    assert all(math.isfinite(sum(completion.logprobs)) for completion in completions)
    if temperature:
        assert len({len(completion.tokens) for completion in completions}) > 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_are_those_of_the_head(dtype: torch.dtype) -> None:
    llama = new_llama(dtype, attention_implementation="per_document")
    groups = new_sampler(llama).sample(PROMPTS, num_each=4, temperature=0.8)
    off = []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            tokens = prompt + completion.tokens
            document = Document(tokens=tokens, prompt_length=len(prompt), temperature=0.8)
            (batch,) = TokenBatch.from_documents([document]).to_kwargs(device="cuda")
            with torch.no_grad():
                expected = llama(batch).logprobs[len(prompt) - 1 : -1].cpu()
            off.append((torch.tensor(completion.logprobs) - expected).abs())
    mean, most = float(torch.cat(off).mean()), float(torch.cat(off).max())
    assert mean < (1e-3 if dtype == torch.float32 else 0.1), (mean, most)


def test_weights_that_changed_in_place_are_seen() -> None:
    llama = new_llama(torch.bfloat16)
    sampler = new_sampler(llama)
    before = sampler.sample(PROMPTS, temperature=0)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.copy_(parameter.roll(1))
    after = sampler.sample(PROMPTS, temperature=0)
    assert after != before
    assert after == new_sampler(llama).sample(PROMPTS, temperature=0)


def test_memory_is_given_back() -> None:
    llama = new_llama(torch.bfloat16, vocab_size=50_000)
    sampler = new_sampler(llama)
    reserved = []
    for number in range(4):
        sampler.sample(PROMPTS, num_each=16)
        if number == 0:
            allocated = torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == allocated
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[3] == reserved[1], reserved


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_models_of_transformers_draw_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family, dtype=torch.float32).cuda()
    assert may_be_static(model)
    assert check_decoding(model, VOCAB_SIZE)
    results = []
    for is_static in (True, True, False):
        decoder = TransformersDecoder(model, is_static=is_static)
        sampler = sampler_of(decoder, [7, 40])
        results.append(flat(sampler.sample(PROMPTS, num_each=5, temperature=0.8)))
        monkeypatch.setattr(sampler_module, "repeated", one_by_one)
    assert results[0] == results[1]
    assert [each.tokens[0] for each in results[0]] == [each.tokens[0] for each in results[2]]


def test_a_step_that_waits_for_the_device_is_refused() -> None:
    number, generator = torch.zeros(1, device="cuda"), torch.Generator("cuda")

    def step() -> None:
        number.item()

    with (
        pytest.raises(UserError, match=r"must be captured as a CUDA graph on .*, which fails"),
        repeated(step, generator),
    ):
        pass
    number += 1
    assert float(number) == 1
    for each in (None, generator):  # they draw as before
        assert torch.rand(2, device="cuda", generator=each).unique().numel() == 2
