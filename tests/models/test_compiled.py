"""Compiled decoder layers: the same numbers, one graph for all layers and few for all lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fastrl import Document, Llama, LlamaConfig, TokenBatch
from fastrl.models.compiled import compile_layers
from fastrl.models.micro_sequences import backward_in_pieces

# Of the tracing itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def config(**options: Any) -> LlamaConfig:
    return LlamaConfig.model_validate(
        {
            "vocab_size": 50,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head": {"losses": {"policy": {"type": "grpo"}}},
            **options,
        }
    )


def batch(*lengths: int) -> Any:
    documents = [
        Document(tokens=list(range(n)), prompt_length=2, logprobs=[-1.0] * (n - 2), advantage=a)
        for n, a in zip(lengths, (1.0, -0.5, 0.3), strict=False)
    ]
    return TokenBatch.from_documents(documents, pad_to_multiple=4).to_kwargs()[0]


@pytest.mark.parametrize(
    ("checkpointing", "backend"),
    [("none", "eager"), ("attention", "aot_eager"), ("full", "eager")],
)
def test_numbers_are_the_same_and_graphs_few(checkpointing: str, backend: str) -> None:
    """Layers share graphs; the second length compiles for all others."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    models = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Llama(config(activation_checkpointing=checkpointing), dtype=torch.float64)
        names = list(model.state_dict())
        if compiles:
            compile_layers(model.model.layers, backend=counter)
        assert list(model.state_dict()) == names
        models.append(model)
    for lengths in ((5, 9), (7, 4, 12), (20,), (6, 6, 6), (3, 11)):
        results = []
        for model in models:
            output = model(batch(*lengths))
            assert output.loss is not None
            grads = torch.autograd.grad(2.5 * output.loss, list(model.parameters()))
            results.append([output.loss, *grads])
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)
    # What runs once per number of document groups is Python; a graph break at attention gives two
    # parts, each for a first and for all other lengths.
    assert counter.frame_count <= 8


def test_pieces_share_graphs() -> None:
    """What a layer keeps of the pieces before is Python's business, not a graph's."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    model = Llama(config(), dtype=torch.float64)
    document = Document(list(range(40)), prompt_length=1, logprobs=[-1.0] * 39, advantage=1.0)
    grads = []
    for compiles in (False, True):
        if compiles:
            compile_layers(model.model.layers, backend=counter)
        for micro_sequences in (2, 8):
            sequence = TokenBatch.from_documents([document])
            pieces = sequence.to_kwargs(micro_sequences=micro_sequences)
            (whole,) = sequence.to_kwargs(micro_sequences=micro_sequences, join=True)
            model.zero_grad()
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                backward_in_pieces(model, pieces, whole)
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-14)
    assert counter.frame_count > 0


def test_sampling_compiles_nothing() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    model = Llama(config())
    compile_layers(model.model.layers, backend=counter)
    logits, cache = model.prefill([[1, 2, 3], [4]], max_new_tokens=4)
    for _ in range(4):
        logits = model.decode(logits.argmax(-1, keepdim=True), cache)
    assert counter.frame_count == 0


@pytest.mark.parametrize(("flag", "name"), [(True, "full"), (False, "none")])
def test_a_flag_stands_for_a_way_of_checkpointing(flag: bool, name: str) -> None:
    assert config(activation_checkpointing=flag).activation_checkpointing == name


def test_varlen_is_refused_on_a_cpu() -> None:
    model = Llama(config(attention_implementation="varlen"))
    with pytest.raises(ValueError, match="`attention_implementation: varlen` needs a CUDA device"):
        model(batch(5))
