"""The reference Llama against transformers, and what packing may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fastrl import Document, Llama, TokenBatch
from fastrl.models.hf_config import llama_config_to_hf
from fastrl.models.llama import RMSNorm
from tests.helpers.model_cases import (
    COMPILES,
    PARITY_CASES,
    VOCAB_SIZE,
    Case,
    packed,
    random_documents,
    randomised,
    tiny_config,
)

LENGTHS = [3, 1, 40, 17, 130, 1, 16, 2]


def transformers_model(llama: Llama) -> Any:
    """The model of transformers with the same weights."""
    values = llama_config_to_hf(llama.config, "float32")
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(llama.state_dict())
    return model


@pytest.mark.parametrize("case", PARITY_CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_packed_documents_equal_transformers_on_each_alone(case: Case) -> None:
    llama = randomised(Llama(case.config())).eval()
    theirs = transformers_model(llama)
    documents = random_documents(LENGTHS)
    hidden_states = llama.hidden_states(*packed(documents, padding=5)).split([*LENGTHS, 5])
    batch = TokenBatch.from_documents(
        [Document(tokens=d.tolist(), prompt_length=1) for d in documents]
    )
    (kwargs,) = batch.to_kwargs()
    logprobs = llama(kwargs, return_logprobs=True).logprobs.split(LENGTHS)
    for number, document in enumerate(documents):
        expected = theirs.model(document[None]).last_hidden_state[0]
        torch.testing.assert_close(hidden_states[number], expected, rtol=0, atol=1e-5)
        expected = theirs(document[None]).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(1, document[1:, None])[:, 0]
        torch.testing.assert_close(logprobs[number][:-1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gradients_equal_transformers(architecture: str) -> None:
    llama = randomised(Llama(tiny_config(architecture=architecture)))
    theirs = transformers_model(llama)
    (document,) = random_documents([23])
    weights = torch.randn(23, llama.config.hidden_size)
    (llama.hidden_states(*packed([document])) * weights).sum().backward()
    (theirs.model(document[None]).last_hidden_state[0] * weights).sum().backward()
    for name, parameter in theirs.model.named_parameters():
        ours = llama.model.get_parameter(name).grad
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)


@COMPILES
@torch.no_grad()
def test_p3_documents_cannot_see_each_other(device: torch.device) -> None:
    backends = ["per_document", *(["flex"] if device.type == "cuda" else [])]
    a, other_a, b = random_documents([3, 3, 4])
    for backend in backends:
        config = tiny_config(attention_implementation=backend, head_dim=16)
        llama = Llama(config, device=device)

        def run(*documents: Tensor, llama: Llama = llama) -> Tensor:
            tokens, positions, index = (tensor.to(device) for tensor in packed(documents))
            return llama.hidden_states(tokens, positions, index)

        after_a, after_other = run(a, b)[3:], run(other_a, b)[3:]
        assert torch.equal(after_a, after_other)
        torch.testing.assert_close(after_a, run(b), rtol=0, atol=1e-5)
        assert not torch.equal(run(a, b)[:3], run(other_a, b)[:3])


def loss_gradients(llama: Llama, documents: list[Tensor], padding: int = 0) -> list[Tensor]:
    """Gradients of a function that is a sum over tokens, whatever their order."""
    tokens, positions, index = packed(documents, padding)
    hidden_states = llama.hidden_states(tokens, positions, index)[index >= 0]
    weight = (tokens[index >= 0, None] + 1.0) / VOCAB_SIZE
    return list(torch.autograd.grad((weight * hidden_states.sin()).sum(), backbone(llama)))


def backbone(llama: Llama) -> list[nn.Parameter]:
    return list(llama.model.parameters())


def test_packing_order_and_padding_leave_gradients() -> None:
    llama = randomised(Llama(tiny_config(), dtype=torch.float64))
    documents = random_documents(LENGTHS)
    expected = loss_gradients(llama, documents)
    alone = [loss_gradients(llama, [document]) for document in documents]
    others = [
        loss_gradients(llama, documents[::-1], padding=7),
        [torch.stack(tensors).sum(0) for tensors in zip(*alone, strict=True)],
    ]
    for other in others:
        for gradient, reference in zip(other, expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-11)


def test_padding_alone_is_finite() -> None:
    llama = Llama(tiny_config())
    hidden_states = llama.hidden_states(*packed([], padding=9))
    assert hidden_states.isfinite().all()
    gradients = torch.autograd.grad(hidden_states.sum(), backbone(llama))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert llama.hidden_states(*packed([])).shape == (0, llama.config.hidden_size)


def saved_elements(llama: Llama, documents: list[Tensor]) -> int:
    """Elements that the forward keeps for the backward, a tensor counted each time it is kept."""
    sizes = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        llama.hidden_states(*packed(documents))
    return sum(sizes)


def test_activation_checkpointing_leaves_gradients() -> None:
    documents = random_documents(LENGTHS)
    plain = Llama(tiny_config(), dtype=torch.float64)
    frugal = Llama(tiny_config(activation_checkpointing=True), dtype=torch.float64)
    frugal.load_state_dict(plain.state_dict())
    kept = [saved_elements(llama, documents) for llama in (plain, frugal)]
    assert kept[1] < kept[0] / 3
    expected, got = loss_gradients(plain, documents), loss_gradients(frugal, documents)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_norm_in_16_bits_is_computed_in_fp32() -> None:
    norm = RMSNorm(512, 1e-5, None, torch.bfloat16)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    # Squares of these overflow or round in bf16 sums.
    hidden_states = 300 * torch.randn(64, 512).to(torch.bfloat16)
    expected = nn.functional.rms_norm(hidden_states.double(), (512,), norm.weight.double(), 1e-5)
    error = (norm(hidden_states).double() - expected).abs()
    assert (error <= 2.0**-8 * expected.abs()).all()  # one rounding, of the result


def test_bf16_angles_are_exact_at_long_positions() -> None:
    config = tiny_config(rope={"type": "default", "theta": 500000.0}, num_hidden_layers=1)
    exact = Llama(config)
    rounded = Llama(config, dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    exact.load_state_dict(rounded.state_dict())  # the same weights
    tokens, positions, index = packed(random_documents([12]))
    far = [llama.hidden_states(tokens, positions + 5001, index) for llama in (exact, rounded)]
    # An angle of 5001 rounded to bf16 is off by up to 16, which makes attention another one.
    assert (far[0] - far[1]).norm() < 0.03 * far[0].norm()


def test_weights_start_from_the_global_generator() -> None:
    config = tiny_config(hidden_size=64, initializer_range=0.05, attention_bias=True)
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(Llama(config))
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    for name, weight in first.items():
        if name.endswith("bias"):
            assert (weight == 0).all()
        elif weight.ndim == 1:
            assert (weight == 1).all()
        else:
            assert not torch.equal(weight, other[name])
            assert weight.std().item() == pytest.approx(0.05, rel=0.1)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="`vocab_size` must be set"):
        Llama(tiny_config(vocab_size=None))
    llama = Llama(tiny_config(attention_implementation="per_document"))
    tokens = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="`document_index` must have the rows of a document next"):
        llama.hidden_states(tokens, tokens, torch.tensor([0, 1, 0]))
    llama = Llama(tiny_config(attention_implementation="flex"))
    with pytest.raises(ValueError, match="`attention_implementation: flex` needs a CUDA device"):
        llama.hidden_states(tokens, tokens, torch.tensor([0, 0, 0]))
