"""Decoding with the key-value cache against the packed forward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl import Document, Llama, TokenBatch
from fastrl.models.kv_cache import KVCache
from tests.helpers.model_cases import LLAMA3_ROPE, packed, randomised, tiny_config

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7]]


def packed_logits(llama: Llama, tokens: list[int]) -> Tensor:
    """Logits after the last of `tokens`, by a forward without cache."""
    hidden_states = llama.hidden_states(*packed([torch.tensor(tokens)]))
    return (hidden_states[-1] @ llama.lm_head.weight.t()).detach()


# Blocks of one slot; of a part of the cache, the last one cut; of more than all of it.
@pytest.mark.parametrize(("key_heads", "block_size"), [(1, 1), (2, 1), (4, 1), (2, 5), (4, 32)])
def test_ragged_prompts_decode_as_whole_documents(key_heads: int, block_size: int) -> None:
    config = tiny_config(num_key_value_heads=key_heads, rope=LLAMA3_ROPE)
    llama = randomised(Llama(config, dtype=torch.float64))
    logits, cache = llama.prefill(PROMPTS, max_new_tokens=6, block_size=block_size)
    texts = [list(prompt) for prompt in PROMPTS]
    for step in range(7):
        expected = torch.stack([packed_logits(llama, text) for text in texts])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
        if step < 6:
            assert cache.room == min(block_size - cache.length % block_size, 6 - step)
            tokens = torch.multinomial(logits.softmax(-1), 1)
            for text, token in zip(texts, tokens[:, 0].tolist(), strict=True):
                text.append(token)
            logits = llama.decode(tokens, cache)
    with pytest.raises(
        ValueError, match=r"`max_length` of the cache is 16 slots, got tokens for 17"
    ):
        llama.decode(tokens, cache)


def test_steps_within_a_block_are_alike() -> None:
    # What a CUDA graph repeats: the same operations on the same shapes, and in-place results.
    llama = randomised(Llama(tiny_config(), dtype=torch.float64))
    token = torch.ones(4, 1, dtype=torch.int64)
    seen: list[list[str]] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            shapes = [tuple(each.shape) for each in args if isinstance(each, Tensor)]
            seen[-1].append(f"{func} {shapes}")
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    def calls(block_size: int, steps: int) -> None:
        _, cache = llama.prefill(PROMPTS, max_new_tokens=steps, block_size=block_size)
        llama.decode(token, cache)
        for _ in range(steps - 1):
            seen.append([])
            with Calls():
                llama.decode(token, cache)

    calls(16, 6)
    assert len(seen[0]) > 20
    assert all(each == seen[0] for each in seen)
    seen.clear()
    calls(1, 3)
    assert seen[0] != seen[1]


def test_several_tokens_at_once_equal_one_by_one() -> None:
    llama = randomised(Llama(tiny_config(), dtype=torch.float64))
    _, cache = llama.prefill(PROMPTS, max_new_tokens=4)
    new = torch.randint(llama.lm_head.config.vocab_size, (len(PROMPTS), 4))
    expected = torch.stack(
        [packed_logits(llama, p + n) for p, n in zip(PROMPTS, new.tolist(), strict=True)]
    )
    torch.testing.assert_close(llama.decode(new, cache), expected, rtol=0, atol=1e-11)


def test_select_repeats_and_drops_sequences() -> None:
    llama = randomised(Llama(tiny_config(), dtype=torch.float64))
    _, cache = llama.prefill(PROMPTS, max_new_tokens=3)
    rows = torch.tensor([2, 0, 0, 3])
    chosen = cache.select(rows)
    first, second = torch.tensor([[1], [2], [3], [4]]), torch.tensor([[6], [7]])
    llama.decode(torch.full((4, 1), 11), cache)  # goes on without a trace in the selection
    llama.decode(first, chosen)
    logits = llama.decode(second, chosen.select(torch.tensor([1, 3])))
    texts = [[*PROMPTS[0], 2, 6], [*PROMPTS[3], 4, 7]]
    expected = torch.stack([packed_logits(llama, text) for text in texts])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)


def test_logits_are_those_of_the_head() -> None:
    # Softcap, scale, bias and padding rows of the vocabulary, as the head's log-probabilities.
    llama = Llama(
        tiny_config(
            padded_vocab_size=32,
            head={"softcap": 3.0, "logit_scale": 0.7, "bias": True},
        ),
        dtype=torch.float64,
    )
    llama = randomised(llama).eval()
    tokens = [4, 8, 15, 16, 23]
    (kwargs,) = TokenBatch.from_documents([Document(tokens=tokens, prompt_length=1)]).to_kwargs()
    expected = llama(kwargs, return_logprobs=True).logprobs[:-1]
    cache = KVCache(torch.zeros(1, dtype=torch.int64), max_length=len(tokens))
    got = []
    for token, label in pairwise(tokens):
        logits = llama.decode(torch.tensor([[token]]), cache)
        assert logits.shape == (1, llama.config.vocab_size)
        got.append(logits.log_softmax(-1)[0, label])
    torch.testing.assert_close(torch.stack(got), expected, rtol=0, atol=1e-11)


def test_padding_sees_something() -> None:
    # A softmax over nothing is NaN in some kernels, and NaN keys would reach every later step.
    cache = KVCache(torch.tensor([2, 0, 3]), max_length=4)
    assert cache.extend(4, torch.float32).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert (cache._mask == 0).any(-1).all()


def test_bf16_logits_are_not_rounded() -> None:
    llama = Llama(tiny_config(), dtype=torch.bfloat16)
    logits, cache = llama.prefill(PROMPTS, max_new_tokens=1)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    assert llama.decode(torch.ones(4, 1, dtype=torch.int64), cache).isfinite().all()


def test_empty_prompts_are_refused() -> None:
    llama = Llama(tiny_config())
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="`prompts` must have at least one token each"):
            llama.prefill(prompts, max_new_tokens=1)
