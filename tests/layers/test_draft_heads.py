"""Draft heads: against their definition, split, and the head itself untouched by them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastrl import Document, DraftHeads, LanguageModelHead, OptimizerStep, TokenBatch
from fastrl.config import DraftConfig
from fastrl.data.drafts import draft_batch
from fastrl.functional.reference import heads as reference_heads
from fastrl.layers.losses import finish_metrics
from tests.helpers.loss_heads import capped_head
from tests.helpers.side_heads import draft_reference, hidden_of, packed_hidden, step_documents

DEPTH = 2
LOSSES: list[dict[str, Any]] = [
    {"type": "cross_entropy", "weight": 0.3},
    {"type": "cross_entropy", "label_smoothing": 0.1, "normalisation": "documents"},
    {"type": "cross_entropy", "normalisation": "groups"},
    {"type": "distillation", "weight": 0.6},
    {"type": "distillation", "divergence": "reverse_kl", "normalisation": "documents"},
]
MAIN = {"policy": {"type": "grpo", "epsilon_high": 2.0}}


def make_heads(loss: dict[str, Any], *, detach: bool = False, **options: Any) -> DraftHeads:
    config = DraftConfig.model_validate({"depth": DEPTH, "loss": loss, "detach_weight": detach})
    return DraftHeads(capped_head(MAIN, **options), config)


def states_of(documents: list[Document]) -> list[list[Tensor]]:
    """Hidden states by depth from 0, of each document."""
    return [hidden_of(documents, 10 + depth) for depth in range(DEPTH + 1)]


def run(heads: DraftHeads, step: OptimizerStep, states: list[list[Tensor]]) -> tuple[Any, ...]:
    """Loss, finished metrics and gradients of hidden states (by depth, document) and parameters."""
    leaves = [[part.clone().requires_grad_() for part in parts] for parts in states]
    steps = [step, *(step.draft(depth) for depth in range(1, DEPTH + 1))]
    losses = []
    for numbers, (batch, *drafts) in zip(step._numbers, zip(*steps, strict=True), strict=True):
        packed = [
            packed_hidden([parts[number] for number in numbers], batch.num_tokens)
            for parts in leaves
        ]
        output = heads(packed[0], batch, list(zip(packed[1:], drafts, strict=True)))
        losses.append(output.loss)
        step.add(output)
    loss = torch.stack(losses).sum()
    flat = [part for parts in leaves for part in parts]
    grads = torch.autograd.grad(-1.7 * loss, [*flat, *heads.parameters()], allow_unused=True)
    return loss.detach(), step.finish(()), list(grads)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_loss_and_gradients_are_the_definition(loss: dict[str, Any], detach: bool) -> None:
    documents = step_documents()
    batch = TokenBatch.from_documents(documents)
    heads, states = make_heads(loss, detach=detach), states_of(documents)
    found, _, grads = run(heads, OptimizerStep([batch]), states)
    leaves = [[part.clone().requires_grad_() for part in parts] for parts in states]
    packed = [torch.cat(parts) for parts in leaves]
    own = heads.head(packed[0], batch.to_kwargs()[0]).loss
    expected = own + draft_reference(heads.head, heads.config, batch, packed)
    torch.testing.assert_close(found, expected.detach(), atol=1e-10, rtol=1e-10)
    flat = [part for parts in leaves for part in parts]
    wanted = torch.autograd.grad(-1.7 * expected, [*flat, *heads.parameters()])
    torch.testing.assert_close(grads, list(wanted), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("loss", [LOSSES[0], LOSSES[4]], ids=str)
@pytest.mark.parametrize("strategy", ["recompute", "auto"])
def test_micro_batches_and_strategies_change_nothing(loss: dict[str, Any], strategy: str) -> None:
    documents = step_documents()
    states = states_of(documents)
    whole = run(make_heads(loss), OptimizerStep([TokenBatch.from_documents(documents)]), states)
    heads = make_heads(loss, strategy=strategy, chunk_size=4)
    step = OptimizerStep.from_documents(documents, max_tokens=16, pad_to_multiple=3)
    assert len(step) > 2
    cut = run(heads, step, states)
    torch.testing.assert_close(cut, whole, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("detach", [False, True])
def test_the_head_itself_is_untouched(detach: bool) -> None:
    documents = step_documents()
    batch = TokenBatch.from_documents(documents)
    heads, states = make_heads(LOSSES[0], detach=detach), states_of(documents)
    kwargs, packed = batch.to_kwargs()[0], [torch.cat(parts) for parts in states]
    packed[0].requires_grad_()
    step = OptimizerStep([batch])
    drafts = [(packed[k], next(iter(step.draft(k)))) for k in (1, 2)]
    alone = heads.head(packed[0], kwargs, return_logprobs=True)
    output = heads(packed[0], kwargs, drafts, return_logprobs=True)
    assert torch.equal(output.logprobs, alone.logprobs)
    assert torch.equal(output.entropy, alone.entropy)
    own = {name: value for name, value in output.metrics.items() if not name.startswith("draft_")}
    assert own.keys() == alone.metrics.keys()
    assert all(torch.equal(value, alone.metrics[name]) for name, value in own.items())
    grads = torch.autograd.grad(output.loss, [packed[0], *heads.parameters()])
    wanted = torch.autograd.grad(alone.loss, [packed[0], *heads.parameters()])
    same = [torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)]
    assert same == [True, detach, detach]
    finished = finish_metrics(output.metrics)
    parts = [finished[f"draft_{k}/loss"] * 0.3 / DEPTH for k in (1, 2)]
    torch.testing.assert_close(output.loss.detach(), alone.loss.detach() + sum(parts))
    heads.eval()
    assert torch.equal(heads(packed[0], kwargs).logprobs, alone.logprobs)


def test_a_weight_that_is_the_models_gives_the_same() -> None:
    documents = step_documents()
    heads, states = make_heads(LOSSES[3]), states_of(documents)
    guest = DraftHeads(
        LanguageModelHead(heads.head.config.model_copy(update={"bias": False}), owns_weight=False),
        heads.config,
    )
    step = OptimizerStep([TokenBatch.from_documents(documents)])
    packed = [torch.cat(parts) for parts in states]
    (batch,) = step
    drafts = [(packed[k], next(iter(step.draft(k)))) for k in (1, 2)]
    expected = heads(packed[0], batch, drafts)
    weight, bias = heads.head.weight, heads.head.bias
    output = guest(packed[0], batch, drafts, weight=weight, bias=bias)
    assert torch.equal(output.loss, expected.loss)
    torch.testing.assert_close(output.metrics, expected.metrics, atol=0, rtol=0)
    with pytest.raises(TypeError, match="`weight` must be a tensor with draft heads"):
        guest(packed[0], batch, drafts, weight=nn.Linear(5, 33))


@pytest.mark.parametrize("depth", [1, 2, 5, 40])
def test_labels_are_further_on_in_the_same_document_on_every_slice(depth: int) -> None:
    documents = step_documents()
    whole = TokenBatch.from_documents(documents, pad_to_multiple=4)
    kwargs = whole.to_kwargs()[0]
    labels = reference_heads.draft_labels(kwargs.labels, kwargs.document_index, depth)
    labels[kwargs.document_index < 0] = -100
    draft = draft_batch(whole, depth)
    assert torch.equal(draft.labels, labels)
    tokens = reference_heads.draft_labels(kwargs.tokens, kwargs.document_index, depth)
    assert torch.equal(draft.tokens, tokens.clamp(min=0))
    assert draft.num_labels == int((labels != -100).sum())
    counts = OptimizerStep([whole]).draft(depth).counts
    assert counts.num_labels_in_batch == draft.num_labels
    numbered = replace(whole, tokens=torch.arange(whole.padded_length))
    for layout, join in product(("contiguous", "zigzag"), (True, False)):
        cut: dict[str, Any] = {"size": 2, "micro_sequences": 2, "layout": layout, "join": join}
        shards = [
            [batch.shard(counts, rank=rank, **cut) for rank in range(2)]
            for batch in (draft, numbered)
        ]
        for of_ranks, own_of_ranks in zip(
            *(zip(*each, strict=True) for each in shards), strict=True
        ):
            gathered = torch.cat([own.tokens for own in own_of_ranks])
            for part, own in zip(of_ranks, own_of_ranks, strict=True):
                assert torch.equal(part.labels, labels[own.tokens])
                targets = own.tokens + depth
                here = (part.labels != -100) & torch.isin(targets, gathered)
                assert torch.equal(gathered[part.target_rows[here]], targets[here])
                assert not join or torch.equal(here, part.labels != -100)


def test_what_means_nothing_is_refused() -> None:
    documents = step_documents()
    batch = TokenBatch.from_documents(documents)
    heads = make_heads(LOSSES[3])
    hidden = torch.cat(states_of(documents)[0])
    step = OptimizerStep([batch])
    (kwargs,) = step
    drafts = [(hidden, next(iter(step.draft(k)))) for k in (1, 2)]
    with pytest.raises(ValueError, match="`drafts` must be 2, one a depth, got 1"):
        heads(hidden, kwargs, drafts[:1])
    with pytest.raises(ValueError, match="`drafts` must be none without a loss, got 2"):
        heads(hidden, kwargs, drafts, compute_loss=False)
    with pytest.raises(ValueError, match="must have batches of draft heads"):
        heads(hidden, kwargs, [(hidden, kwargs)] * 2)
    with pytest.raises(ValueError, match="`losses` must not be named like draft heads"):
        DraftHeads(capped_head({"draft_1": {"type": "z_loss"}}), heads.config)
    first, _ = draft_batch(batch, 1).to_kwargs(micro_sequences=2)
    with pytest.raises(ValueError, match="continues in another, where its target is"):
        heads(hidden[: len(hidden) // 2], kwargs.span(0, len(hidden) // 2), [(hidden, first)] * 2)
    answers = [Document([1, 2, 3, last], prompt_length=3, group_id=0) for last in (4, 5)]
    shared = TokenBatch.from_documents(answers, share_prefixes=True)
    with pytest.raises(ValueError, match="`share_prefixes` must not be given with draft heads"):
        draft_batch(shared, 1)
    with pytest.raises(ValueError, match="`depth` must be at least 1"):
        draft_batch(batch, 0)
