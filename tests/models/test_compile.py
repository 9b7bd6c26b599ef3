"""torch.compile of the whole model: the same numbers, and few graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fastrl import BatchKwargs, Document, HeadOutput, Llama, LlamaConfig, TokenBatch
from fastrl.config import HeadOptions
from fastrl.config.policy_losses import GSPOLossConfig
from fastrl.models.attention import FlexDocumentAttention, PerDocumentAttention
from fastrl.models.rotary import Rotary

# torch warns of itself when it compiles.
pytestmark = pytest.mark.filterwarnings("ignore")

# Documents of like length, so that their number is all that changes.
LENGTHS = [(5, 7, 3), (9, 4), (16, 2, 3, 7, 8, 9, 4)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _llama(device: torch.device, *, checkpointing: bool = False) -> Llama:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
        activation_checkpointing=checkpointing,
        head=HeadOptions(losses={"policy": GSPOLossConfig()}),
    )
    return Llama(config, device=device)


def _batch(lengths: tuple[int, ...], device: torch.device) -> BatchKwargs:
    generator = torch.Generator().manual_seed(len(lengths))
    documents = [
        Document(
            tokens=torch.randint(64, (length,), generator=generator),
            prompt_length=1,
            logprobs=torch.randn(length - 1, generator=generator) - 4,
            advantage=number % 2 - 0.4,
        )
        for number, length in enumerate(lengths)
    ]
    (batch,) = TokenBatch.from_documents(documents).to_kwargs(device=device)
    return batch


def _step(call: Callable[..., HeadOutput], llama: Llama, batch: BatchKwargs) -> list[Tensor]:
    output = call(batch)
    assert output.loss is not None
    (3.0 * output.loss).backward()
    gradients = [parameter.grad for parameter in llama.parameters()]
    llama.zero_grad()
    assert all(gradient is not None for gradient in gradients)
    return [output.loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def test_what_layers_call_is_hashed_by_identity() -> None:
    """torch 2.11 hashes it while it compiles, before it has fields."""
    for kind in (Rotary, PerDocumentAttention, FlexDocumentAttention):
        hash(object.__new__(kind))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_gives_the_same(device: torch.device, checkpointing: bool) -> None:
    llama = _llama(device, checkpointing=checkpointing)
    batches = [_batch(lengths, device) for lengths in LENGTHS]
    expected = [_step(llama, llama, batch) for batch in batches]
    compiled = torch.compile(llama, backend="eager")
    graphs = []
    for batch, before in zip(batches, expected, strict=True):
        torch.testing.assert_close(_step(compiled, llama, batch), before, rtol=1e-4, atol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    # One more for dynamic shapes; the number of documents is none of a graph's business.
    assert graphs[1] == graphs[-1]
    # Around the grouping of documents on the host (not on a GPU) and around the head.
    assert len(counters["graph_break"]) <= 2
