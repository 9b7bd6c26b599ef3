"""The sampler: what it says about its tokens is what the head says about them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document
from fastrl.training.llama_model import LlamaDecoder, LlamaModel
from fastrl.training.sampler import Completion, Sampler
from tests.helpers.runs import tiny_context

PROMPTS = [[5, 12, 3], [7], [1, 2, 3, 4, 5, 6, 7], [9, 9]]


def _sampler(*overrides: str) -> Sampler:
    sampler = tiny_context("environment.heldout_prompts=1", *overrides)[1].sampler
    sampler._generator.manual_seed(1)
    return sampler


def _head_logprobs(
    sampler: Sampler, prompt: list[int], completion: Completion, temperature: float
) -> list[float]:
    tokens = prompt + completion.tokens
    document = Document(tokens=tokens, prompt_length=len(prompt), temperature=temperature)
    (batch,) = TokenBatch.from_documents([document]).to_kwargs()
    assert isinstance(sampler._decoder, LlamaDecoder)
    logprobs = LlamaModel(sampler._decoder.llama, sampler._processes).logprobs(batch)
    numbers: list[float] = logprobs[len(prompt) - 1 : -1].tolist()
    return numbers


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_logprobs_are_those_of_the_head(temperature: float, batch_size: int) -> None:
    sampler = _sampler("sampler.max_new_tokens=12", f"sampler.max_batch_size={batch_size}")
    groups = sampler.sample(PROMPTS, num_each=3, temperature=temperature)
    assert [len(group) for group in groups] == [3] * 4
    lengths = set()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            lengths.add(len(completion.tokens))
            assert len(completion.tokens) == len(completion.logprobs) <= 12
            expected = _head_logprobs(sampler, prompt, completion, temperature)
            assert completion.logprobs == pytest.approx(expected, abs=1e-10)
    assert len(lengths) > 2  # so that finished sequences left the batch


def test_a_completion_ends_with_its_first_end_token() -> None:
    groups = _sampler("sampler.max_new_tokens=12").sample(PROMPTS, num_each=20)
    completions = [completion for group in groups for completion in group]
    assert {completion.finished for completion in completions} == {True, False}
    for completion in completions:
        assert (completion.tokens.count(0), completion.tokens[-1] == 0) in ((0, False), (1, True))
        assert completion.finished == (completion.tokens[-1] == 0)
        assert completion.finished or len(completion.tokens) == 12


def test_temperature_0_takes_the_most_likely_token() -> None:
    sampler = _sampler()
    for prompt, (completion,) in zip(PROMPTS, sampler.sample(PROMPTS, temperature=0), strict=True):
        tokens = list(prompt)
        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
            logits, _ = sampler._decoder.prefill([tokens], 1)
            assert token == int(logits.argmax())
            assert logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-10)
            tokens.append(token)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    sampler = _sampler("sampler.max_new_tokens=1", "sampler.max_batch_size=4096")
    number = 4000
    (group,) = sampler.sample([PROMPTS[2]], num_each=number, temperature=temperature)
    counts = Counter(completion.tokens[0] for completion in group)
    logits, _ = sampler._decoder.prefill([PROMPTS[2]], 1)
    probabilities = (logits[0] / temperature).softmax(-1)
    for token, probability in enumerate(probabilities.tolist()):
        deviation = (number * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - number * probability) < 4.5 * deviation + 1


def test_the_generator_alone_decides() -> None:
    sampler = _sampler()
    first = sampler.sample(PROMPTS, num_each=5)
    assert sampler.sample(PROMPTS, num_each=5) != first
    torch.manual_seed(5)
    sampler._generator.manual_seed(1)
    assert sampler.sample(PROMPTS, num_each=5) == first
