"""`main_grad`: the weight's gradient added to the caller's buffer, and no other of its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import BatchKwargs, LanguageModelHead, linear_logprobs
from fastrl.functional.head.call import HeadOperands
from fastrl.functional.head.main_grad import with_main_grad
from tests.helpers.keep_sets import recorded_entries
from tests.helpers.largest_tensor import LargestTensor
from tests.helpers.loss_documents import pack, policy_documents
from tests.helpers.loss_heads import capped_head, random_hidden

OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"strategy": "recompute"},
    "recompute_in_chunks": {"strategy": "recompute", "chunk_size": 4},
    "single_pass": {"strategy": "single_pass", "chunk_size": 8},
    "top_k": {"keep": {"top_k": 4}},
    "recorded": {"keep": {"recorded": True}},
    "mixed": {"keep": {"recorded": True}},
}


def make(name: str, dtype: torch.dtype) -> tuple[LanguageModelHead, Tensor, BatchKwargs]:
    head = capped_head({"policy": {"type": "reinforce"}}, **OPTIONS[name]).to(dtype)
    batch = pack(policy_documents())
    hidden = random_hidden(batch).to(dtype).requires_grad_()
    return head, hidden, batch.replace(kept_tokens=recorded_entries(name, batch))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "buffer_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_the_gradient_is_added_to_the_buffer(
    name: str, dtype: torch.dtype, buffer_dtype: torch.dtype
) -> None:
    head, hidden, batch = make(name, dtype)
    before = 0.1 * torch.randn(head.weight.shape, dtype=torch.float64).to(buffer_dtype)
    buffer = before.clone()
    (head(hidden, batch, main_grad=buffer).loss * -1.7).backward()
    assert head.weight.grad is None
    assert head.bias is not None
    found = [hidden.grad, head.bias.grad]
    hidden.grad = head.bias.grad = None
    (head(hidden, batch).loss * -1.7).backward()
    assert head.weight.grad is not None
    tolerance = 1e-12 if dtype == torch.float64 else 4e-3
    added = buffer.double() - before.double()
    assert (added - head.weight.grad).norm() <= tolerance * head.weight.grad.norm()
    for same, wanted in zip(found, [hidden.grad, head.bias.grad], strict=True):
        assert torch.equal(same, wanted)


@pytest.mark.parametrize("name", ["recorded", "mixed", "recompute"])
def test_nothing_of_the_size_of_the_weight_is_made(name: str) -> None:
    vocabulary, depth = 4000, 8
    head = capped_head(
        {"policy": {"type": "reinforce"}},
        **OPTIONS[name] | {"hidden_size": depth, "padded_vocab_size": vocabulary},
        vocab_size=vocabulary,
        max_logits_bytes=2**14,
    )
    batch = pack(policy_documents())
    batch = batch.replace(kept_tokens=recorded_entries(name, batch))
    hidden, buffer = random_hidden(batch, depth).requires_grad_(), torch.zeros_like(head.weight)
    peaks = []
    for main_grad in (buffer, None):
        with LargestTensor(head.weight, buffer) as largest:
            head(hidden, batch, main_grad=main_grad).loss.backward()
        peaks.append(largest.numel)
    assert peaks[0] < head.weight.numel() / 2
    assert peaks[1] == head.weight.numel()


def test_what_the_buffer_is_not_for_is_refused() -> None:
    head, hidden, batch = make("recompute", torch.float32)
    buffer = torch.zeros_like(head.weight)
    for wrong in (buffer[1:], buffer.double()):
        with pytest.raises(
            ValueError, match=r"`main_grad` must be torch.float32 of shape \[33, 5\]"
        ):
            head(hidden, batch, main_grad=wrong)
    with torch.no_grad(), pytest.raises(ValueError, match="must not be given without gradients"):
        head(hidden, batch, main_grad=buffer)
    with pytest.raises(ValueError, match="for a weight that has no gradient of its own"):
        linear_logprobs(hidden, head.weight.detach(), batch.labels, main_grad=buffer)
    lora = HeadOperands(hidden, head.weight, low_rank_weight=torch.zeros(33, 2))
    with pytest.raises(ValueError, match="for a weight that has no gradient of its own"):
        with_main_grad(lora, buffer)
