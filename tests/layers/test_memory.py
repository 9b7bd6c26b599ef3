"""No tensor of [T, V] exists, in forward or backward, and none of [V, D] for a frozen head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastrl import Document, LanguageModelHead, LanguageModelHeadConfig
from tests.helpers.batches import pack

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 96, 32, 640


class Recorder(TorchDispatchMode):
    """Records the shape of every tensor that an operator returns, but for views of some others."""

    def __init__(self, *others: Tensor) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        self.others = {other.untyped_storage().data_ptr() for other in others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.others:
                self.shapes.append(leaf.shape)
        return result

    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(shape.numel() for shape in self.shapes)

    def rows_of_logits(self) -> int:
        """Rows of the tallest tensor that has the vocabulary as its last dimension."""
        return max(shape[0] for shape in self.shapes if shape[1:] == (VOCAB_SIZE,))


def make(loss: str, **options: object) -> tuple[LanguageModelHead, Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    documents = [
        Document(
            tokens=torch.randint(VOCAB_SIZE, (12,), generator=generator).tolist(),
            prompt_length=1,
            logprobs=[-6.5] * 12,
            advantage=1.0 - 2 * (index % 2),
        )
        for index in range(NUM_TOKENS // 12)
    ]
    config = {
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "losses": {"policy": {"type": loss}},
    }
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config | options))
    batch = pack(documents)
    hidden = torch.randn(batch.num_tokens, HIDDEN_SIZE, generator=generator, requires_grad=True)
    return head, hidden, batch


@pytest.mark.parametrize("loss", ["cross_entropy", "grpo", "gspo"])
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_no_logits_of_all_tokens_exist(loss: str, strategy: str) -> None:
    elements = VOCAB_SIZE * 12
    head, hidden, batch = make(loss, strategy=strategy, max_logits_bytes=4 * elements)
    with Recorder(head.weight) as recorder:
        head(hidden, batch).loss.backward()
    assert recorder.largest() == max(elements, head.weight.numel()) < NUM_TOKENS * VOCAB_SIZE
    head, hidden, batch = make(loss, strategy=strategy)
    with Recorder(head.weight) as recorder:
        head(hidden, batch).loss.backward()
    assert recorder.largest() >= VOCAB_SIZE * batch.num_labels_in_batch


@pytest.mark.parametrize("loss", ["cross_entropy", "grpo", "gspo"])
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_a_frozen_head_allocates_nothing_of_its_weight(loss: str, strategy: str) -> None:
    head, hidden, batch = make(loss, strategy=strategy, max_logits_bytes=VOCAB_SIZE * 12 * 4)
    head.requires_grad_(False)
    with Recorder(head.weight) as recorder:
        head(hidden, batch).loss.backward()
    assert recorder.largest() < head.weight.numel()
    assert hidden.grad is not None
    assert hidden.grad.count_nonzero() > 0


@pytest.mark.parametrize("chunk_size", [11, 24])
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_u2_the_chunk_size_bounds_every_pass(chunk_size: int, strategy: str) -> None:
    head, hidden, batch = make("gspo", strategy=strategy, chunk_size=chunk_size)
    with Recorder(head.weight) as recorder:
        head(hidden, batch, return_logprobs=True).loss.backward()
    assert 0 < recorder.rows_of_logits() <= chunk_size
    head.eval()
    with Recorder(head.weight) as recorder, torch.no_grad():
        head(hidden, batch)
    assert 0 < recorder.rows_of_logits() <= chunk_size
