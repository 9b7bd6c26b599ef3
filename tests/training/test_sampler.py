"""The sampler: what it says about its tokens is what the head says about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document
from fastrl.training import sampler as sampler_module
from fastrl.training.draws import Completion, Draws
from fastrl.training.llama_model import LlamaDecoder, LlamaModel
from fastrl.training.sampler import Sampler
from tests.helpers.runs import tiny_context

PROMPTS = [[5, 12, 3], [7], [1, 2, 3, 4, 5, 6, 7], [9, 9]]


def _sampler(*overrides: str) -> Sampler:
    sampler = tiny_context("environment.heldout_prompts=1", *overrides)[1].sampler
    sampler._generator.manual_seed(1)
    return sampler


def _with_blocks(sampler: Sampler, size: int) -> Sampler:
    """The same, with a cache as on a GPU."""
    assert isinstance(sampler._decoder, LlamaDecoder)
    decoder = LlamaDecoder(sampler._decoder.llama, sampler._processes, block_size=size)
    ends = sampler._end_tokens.tolist()
    return Sampler(sampler.config, decoder, ends, sampler._generator, sampler._processes)


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
@pytest.mark.parametrize(("batch_size", "block"), [(1, 1), (5, 1), (100, 1), (5, 5), (100, 64)])
def test_logprobs_are_those_of_the_head(temperature: float, batch_size: int, block: int) -> None:
    sampler = _sampler("sampler.max_new_tokens=12", f"sampler.max_batch_size={batch_size}")
    sampler = _with_blocks(sampler, block)
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_drawn_as_by_multinomial(temperature: float) -> None:
    sampler = _sampler("sampler.max_new_tokens=1")
    completions = sampler.sample(PROMPTS, temperature=temperature)
    found = [completion.tokens[0] for (completion,) in completions]
    logits, _ = sampler._decoder.prefill(PROMPTS, 1)
    expected = logits.argmax(-1)
    if temperature:
        generator = torch.Generator().manual_seed(1)
        probabilities = (logits / temperature).softmax(-1)
        expected = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    assert found == expected.tolist()


def test_blocks_leave_out_no_end() -> None:
    # Several end tokens; sequences end within blocks, all before the last, and leave between them.
    sampler = _sampler("sampler.max_new_tokens=40")
    sampler._end_tokens = torch.tensor([0, 3, 5])
    prompts = [[first, second] for first in range(1, 9) for second in (3, 5, 7)]
    expected = sampler.sample(prompts, temperature=0)
    lengths = {len(completion.tokens) for (completion,) in expected}
    assert len(lengths) > 3
    for size in (2, 7, 100):
        found = _with_blocks(sampler, size).sample(prompts, temperature=0)
        for (completion,), (other,) in zip(found, expected, strict=True):
            assert completion.tokens == other.tokens
            assert completion.finished == other.finished == (other.tokens[-1] in (0, 3, 5))
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-12)


@contextmanager
def _as_graphs_do(
    step: Callable[[], None], generator: torch.Generator
) -> Iterator[Callable[[], None]]:
    """A capture runs the host's part of a step alone, a replay the device's.

    At the end the capture's memory goes, of which nothing may be held any more.
    """
    draws = getattr(step, "__self__")  # noqa: B009
    assert isinstance(draws, Draws)
    cache = draws.cache

    def tensors() -> list[Tensor]:
        held = [*vars(draws).values(), *vars(cache).values()]
        return [each for each in held if isinstance(each, Tensor)]

    before = [(each, each.clone()) for each in tensors()]
    state, captured = generator.get_state(), cache.length
    step()
    for tensor, values in before:
        tensor.copy_(values)
    generator.set_state(state)
    identities = {id(each) for each in vars(draws).values()}

    def replay() -> None:
        length = cache.length
        vars(cache)["length"] = captured
        step()
        vars(cache)["length"] = length
        assert {id(each) for each in vars(draws).values()} == identities

    yield replay
    kept = [each for each, _ in before]
    assert all(any(each is other for other in kept) for each in tensors())


def test_a_captured_step_goes_on_where_its_replays_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = _with_blocks(_sampler("sampler.max_new_tokens=40"), 11)
    expected = sampler.sample(PROMPTS, num_each=9)
    monkeypatch.setattr(sampler_module, "repeated", _as_graphs_do)
    sampler._generator.manual_seed(1)
    assert sampler.sample(PROMPTS, num_each=9) == expected
    assert max(len(completion.tokens) for group in expected for completion in group) > 11
