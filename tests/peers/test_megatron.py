"""The head in the place of Megatron-core's output layer, against the model's own logits.

On gloo ranks: Megatron runs on a CPU once the device and the random states it asks CUDA for are
replaced. tests/gpu/test_megatron.py runs the same on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
from tests.helpers.megatron_models import (
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    MegatronCase,
    make_megatron,
    megatron_gradients,
    megatron_inputs,
    megatron_labels,
)
from tests.helpers.peer_packages import peer_module
from tests.helpers.ranks import RankError, RankPool

peer_module("megatron.core.models.gpt")
adapter = peer_module("fastrl.integrations.megatron")

UPSTREAM = torch.linspace(-1.0, 2.0, ROWS * LENGTH, dtype=torch.float64).view(ROWS, LENGTH)

CASES = {
    "untied": MegatronCase(),
    "tied": MegatronCase(tied=True),
    "main_grad": MegatronCase(main_grad=True),
    "tied_main_grad": MegatronCase(tied=True, main_grad=True),
    "sequence_parallel": MegatronCase(sequence_parallel=True, main_grad=True),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("ranks"), timeout=240)
    yield pool
    pool.close()


def _value(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return (UPSTREAM * logprobs).sum() + (UPSTREAM.flip(0) * entropy).sum()


def _by_own_logits(model: Any, case: MegatronCase, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(**megatron_inputs(case), runtime_gather_output=True)
    logp = (logits / temperature[..., None]).log_softmax(-1)
    labels = megatron_labels(case)
    found = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return found.where(labels != -100, 0), entropy.where(labels != -100, 0)


def _compare(case: MegatronCase, processor: bool) -> dict[str, float]:
    """Largest differences from the model's own logits, on this rank."""
    model = make_megatron(case)
    inner = model.module if case.main_grad else model
    if processor:
        inner.forward = _with_output_processor(inner)
    temperature = 0.5 + torch.rand(
        ROWS, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    logprobs, entropy = _by_own_logits(model, case, temperature)
    wanted = megatron_gradients(model, _value(logprobs, entropy))
    found = adapter.token_statistics(
        model,
        megatron_labels(case),
        temperature=temperature,
        entropy=True,
        **megatron_inputs(case),
    )
    grads = megatron_gradients(model, _value(found.logprobs, found.entropy))
    assert "_postprocess" not in vars(inner)
    assert sum(float(grad.abs().max() > 0) for grad in wanted.values()) > 5
    if case.main_grad:
        weight = (
            inner.shared_embedding_or_output_weight() if case.tied else inner.output_layer.weight
        )
        assert weight.grad_added_to_main_grad
    return {
        "logprobs": (found.logprobs - logprobs).abs().max().item(),
        "entropy": (found.entropy - entropy).abs().max().item(),
        **{name: (grads[name] - wanted[name]).abs().max().item() for name in wanted},
    }


def _with_output_processor(model: Any) -> Any:
    """The forward of Megatron-core 0.18, which has the hook, around that of 0.16."""
    own = model.forward

    def forward(*args: Any, output_processor: Any = None, **kwargs: Any) -> Any:
        if output_processor is None:
            return own(*args, **kwargs)
        model._postprocess = lambda **rest: output_processor(
            hidden_states=rest["hidden_states"],
            output_layer=model.output_layer,
            output_weight=None,
            labels=rest["labels"],
            context=None,
            config=model.config,
        )
        try:
            return own(*args, **kwargs)
        finally:
            del model._postprocess

    assert "output_processor" in inspect.signature(forward).parameters
    return forward


@pytest.mark.parametrize("processor", [False, True], ids=["postprocess", "output_processor"])
@pytest.mark.parametrize(
    ("size", "name"),
    [(size, name) for size in (1, 2) for name in CASES if size > 1 or name != "sequence_parallel"],
)
def test_the_statistics_are_those_of_megatrons_logits(
    size: int, name: str, processor: bool, ranks: RankPool
) -> None:
    case = CASES[name]
    for differences in ranks(_compare, size, case, processor):
        assert max(differences.values()) < 1e-9, differences


def _documents() -> list[Document]:
    return [
        Document(
            tokens=[3, 1, 4, 1, 5], prompt_length=2, logprobs=[-3.0, -2.0, -4.0], advantage=1.0
        ),
        Document(tokens=[2, 7, 9], prompt_length=1, logprobs=[-3.5, -2.5], advantage=-0.5),
    ]


def _loss(case: MegatronCase) -> dict[str, float]:
    """The difference between losses and gradients of the head inside and outside of the model."""
    model = make_megatron(case)
    (batch,) = TokenBatch.from_documents(_documents(), pad_to_multiple=8).to_kwargs()
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]
    inputs = {
        "input_ids": batch.tokens[None],
        "position_ids": batch.positions[None],
        "attention_mask": mask | (batch.document_index[:, None] != batch.document_index[None]),
    }
    losses: Any = {"policy": {"type": "gspo"}}
    config = LanguageModelHeadConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, losses=losses)
    head = LanguageModelHead(config, adapter.head_groups(model), owns_weight=False)
    output = adapter.head_output(model, head, batch, compute_loss=True, **inputs)
    grads = megatron_gradients(model, 1.7 * output.loss)
    logits = model(**inputs, runtime_gather_output=True)[0]
    labels = batch.labels.clamp(min=0)
    logprobs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (loss,) = head.losses.values()
    statistics = peer_module("fastrl").TokenStatistics(logprobs, None, logprobs)
    expected = loss(statistics, batch)
    wanted = megatron_gradients(model, 1.7 * expected)
    assert wanted["output_layer.weight"].abs().max() > 0
    return {
        "loss": (output.loss - expected).abs().item(),
        **{name: (grads[name] - wanted[name]).abs().max().item() for name in wanted},
    }


@pytest.mark.parametrize("size", [1, 2])
def test_the_losses_are_those_of_megatrons_logits(size: int, ranks: RankPool) -> None:
    case = MegatronCase(main_grad=True, sequence_parallel=size > 1)
    for differences in ranks(_loss, size, case):
        assert max(differences.values()) < 1e-7, differences


def _refused(option: str) -> None:
    case = MegatronCase()
    model = make_megatron(case)
    if option == "skip_bias_add":
        model.output_layer.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    setattr(model.output_layer if option == "skip_bias_add" else model.config, option, True)
    adapter.token_statistics(model, megatron_labels(case), **megatron_inputs(case))


@pytest.mark.parametrize(
    "option", ["defer_embedding_wgrad_compute", "mtp_num_layers", "skip_bias_add", "use_mup"]
)
def test_what_the_output_layer_alone_would_do_is_refused(option: str, ranks: RankPool) -> None:
    with pytest.raises(RankError, match=f"must not set \\['{option}'\\]"):
        ranks(_refused, 1, option)


def test_a_model_of_another_kind_and_labels_for_megatron_are_refused() -> None:
    labels = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be a GPTModel of Megatron-core"):
        adapter.token_statistics(torch.nn.Linear(2, 2), labels)
    with pytest.raises(TypeError, match="labels"):
        adapter.token_statistics(torch.nn.Linear(2, 2), labels, labels=labels)
