"""W5: a tied head stays one parameter through whatever makes new parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fastrl import BatchKwargs, Document, Llama, TokenBatch
from fastrl.models.checkpoint import load_llama, load_weights, save_llama
from tests.helpers.model_cases import packed, tiny_config

TOKENS = [1, 5, 2, 5, 0, 7]
CONFIG = tiny_config(
    vocab_size=8, tie_word_embeddings=True, head={"losses": {"lm": {"type": "cross_entropy"}}}
)


def from_meta(folder: Path) -> Llama:
    llama = Llama(CONFIG, device="meta", dtype=torch.float64)
    llama.to_empty(device="cpu")
    load_weights(llama, folder)
    return llama


def from_meta_inside_a_module(folder: Path) -> Llama:
    llama = Llama(CONFIG, device="meta", dtype=torch.float64)
    nn.Sequential(llama).to_empty(device="cpu")
    load_weights(llama, folder)
    return llama


def loaded(folder: Path) -> Llama:
    return load_llama(folder, head=CONFIG.head, dtype=torch.float64)


def assigned(folder: Path) -> Llama:
    llama = Llama(CONFIG, device="meta", dtype=torch.float64)
    state = {name: tensor.clone() for name, tensor in loaded(folder).state_dict().items()}
    llama.load_state_dict(state, assign=True)
    return llama


def copied(folder: Path) -> Llama:
    return copy.deepcopy(loaded(folder))


def cast(folder: Path) -> Llama:
    return load_llama(folder, head=CONFIG.head).to(torch.float64)


def batch() -> BatchKwargs:
    (kwargs,) = TokenBatch.from_documents([Document(tokens=TOKENS, prompt_length=1)]).to_kwargs()
    return kwargs


def side_gradients(llama: Llama) -> tuple[Tensor, Tensor]:
    """Gradients of the input side and of the output side, with a dense head."""
    embedding = llama.model.embed_tokens.weight.detach().clone().requires_grad_()
    head = embedding.detach().clone().requires_grad_()
    alone = copy.deepcopy(llama)
    alone.model.embed_tokens.weight = nn.Parameter(embedding)
    hidden_states = alone.hidden_states(*packed([torch.tensor(TOKENS)]))
    logprobs = (hidden_states[:-1] @ head.t()).log_softmax(-1)
    loss = -logprobs.gather(1, torch.tensor(TOKENS)[1:, None]).mean()
    (of_head,) = torch.autograd.grad(loss, [head], retain_graph=True)
    (of_embedding,) = torch.autograd.grad(loss, [alone.model.embed_tokens.weight])
    return of_embedding, of_head


@pytest.mark.parametrize(
    "make", [from_meta, from_meta_inside_a_module, loaded, assigned, copied, cast]
)
def test_w5_the_head_stays_tied(make: Callable[[Path], Llama], tmp_path: Path) -> None:
    save_llama(Llama(CONFIG), tmp_path / "model")
    llama = make(tmp_path / "model")
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    for _ in range(2):
        assert llama.lm_head.weight is llama.model.embed_tokens.weight
        assert "lm_head.weight" not in dict(llama.named_parameters())
        of_embedding, of_head = side_gradients(llama)
        loss = llama(batch()).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        gradient = llama.model.embed_tokens.weight.grad
        torch.testing.assert_close(gradient, of_embedding + of_head, rtol=0, atol=1e-12)
        assert not torch.allclose(of_embedding, torch.zeros_like(of_embedding))
        optimizer.step()
    assert torch.equal(llama.lm_head.weight, llama.model.embed_tokens.weight)


def test_an_untied_head_stays_untied(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"tie_word_embeddings": False})
    llama = Llama(config, device="meta")
    llama.to_empty(device="cpu")
    llama.reset_parameters()
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight
    assert not torch.equal(llama.lm_head.weight, llama.model.embed_tokens.weight)
    assert all(parameter.isfinite().all() for parameter in llama.parameters())
