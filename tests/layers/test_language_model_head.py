"""The head against the definition, and its invariances: packing, order, micro-batches, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import (
    BatchCounts,
    BatchKwargs,
    Document,
    LanguageModelHead,
    LanguageModelHeadConfig,
    Llama,
    LlamaConfig,
    RowSet,
    TokenBatch,
    TokenStatistics,
)
from fastrl.config import CrossEntropyLossConfig, GRPOLossConfig
from fastrl.functional.head.checks import check_inputs
from fastrl.layers.losses import CrossEntropyLoss, add_metrics
from tests.helpers.batches import (
    content_hidden,
    pack,
    padded_head,
    ragged_documents,
    reference_loss,
)
from tests.helpers.bf16_heads import grpo_batch, grpo_head

LOSSES: dict[str, dict[str, object]] = {
    "cross_entropy": {"type": "cross_entropy"},
    "cross_entropy_documents": {"type": "cross_entropy", "normalisation": "documents"},
    "grpo": {"type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.3},
    "grpo_constant": {"type": "grpo", "normalisation": "constant", "length": 16},
    "gspo": {"type": "gspo", "epsilon_low": 0.2, "epsilon_high": 0.25},
    "gspo_tokens": {"type": "gspo", "normalisation": "tokens"},
}
TRANSFORMS: dict[str, dict[str, object]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 1.7},
    "everything": {"bias": True, "softcap": 4.0, "logit_scale": 0.8},
}
CHUNKS = {"grpo": (1, 2, 3, 5, 16, None), "gspo": (12, 16, None)}


def gradients(loss: Tensor, head: LanguageModelHead, hidden: Tensor) -> list[Tensor]:
    """Gradients with an upstream gradient that is not 1."""
    inputs = [hidden, *head.parameters()]
    return list(torch.autograd.grad(loss, inputs, torch.tensor(-1.7, dtype=loss.dtype)))


def assert_equal_to_reference(
    head: LanguageModelHead, documents: Sequence[Document], **changes: object
) -> None:
    batch = pack(documents, pad_to_multiple=8).replace(**changes)
    hidden = content_hidden(batch)
    output = head(hidden, batch)
    expected = reference_loss(head, hidden, batch)
    torch.testing.assert_close(output.loss, expected, atol=1e-10, rtol=1e-10)
    actual_grads = gradients(output.loss, head, hidden)
    for actual, wanted in zip(actual_grads, gradients(expected, head, hidden), strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-10)
    assert actual_grads[0][batch.labels == -100].count_nonzero() == 0


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
@pytest.mark.parametrize("metrics", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_equal_the_reference(loss: str, strategy: str, metrics: bool) -> None:
    chunks = CHUNKS["gspo" if loss.startswith("gspo") else "grpo"]
    for chunk_size in chunks:
        head = padded_head(
            losses={"policy": LOSSES[loss]},
            strategy=strategy,
            chunk_size=chunk_size,
            metrics=metrics,
        )
        assert_equal_to_reference(head, ragged_documents())


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("temperature", ["one", "scalar", "per_token"])
def test_transforms_equal_the_reference(transform: str, temperature: str, strategy: str) -> None:
    losses = {"policy": LOSSES["gspo"], "other": LOSSES["grpo"] | {"weight": 0.3}}
    options: dict[str, object] = {"losses": losses, "strategy": strategy, "chunk_size": 16}
    num_tokens = pack(ragged_documents(), pad_to_multiple=8).num_tokens
    temperatures = {
        "one": 1.0,
        "scalar": 0.7,
        "per_token": torch.linspace(0.5, 1.5, num_tokens, dtype=torch.float64),
    }
    assert_equal_to_reference(
        padded_head(**(options | TRANSFORMS[transform])),
        ragged_documents(),
        temperature=temperatures[temperature],
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
@pytest.mark.parametrize(
    "chosen", [(2,), (4,), (2, 4), (3,), (1,), ()], ids=lambda chosen: f"documents{chosen}"
)
def test_nothing_to_learn_from(chosen: tuple[int, ...], strategy: str, loss: str) -> None:
    documents = [ragged_documents()[index] for index in chosen]
    head = padded_head(losses={"policy": LOSSES[loss]}, strategy=strategy)
    batch = pack(documents, pad_to_multiple=8)
    hidden = content_hidden(batch)
    output = head(hidden, batch)
    grads = gradients(output.loss, head, hidden)
    assert all(grad.isfinite().all() for grad in grads)
    assert all(metric.isfinite() for metric in output.metrics.values())
    if batch.num_labels_in_batch == 0:
        assert output.loss.item() == 0
        assert all(grad.count_nonzero() == 0 for grad in grads)
    else:
        torch.testing.assert_close(output.loss, reference_loss(head, hidden, batch))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_packing_order_and_micro_batches_change_nothing(loss: str, strategy: str) -> None:
    documents = ragged_documents()
    head = padded_head(losses={"policy": LOSSES[loss]}, strategy=strategy)

    def run(parts: list[list[int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
        columns = ("advantages", "old_logprobs")
        batches = [
            TokenBatch.from_documents([documents[i] for i in part], columns=columns)
            for part in parts
        ]
        counts = BatchCounts.of(batches)
        head.zero_grad()
        metrics: list[dict[str, Tensor]] = []
        total = torch.zeros((), dtype=torch.float64)
        for part in batches:
            (batch,) = part.to_kwargs(counts=counts)
            output = head(content_hidden(batch), batch)
            output.loss.backward()
            total += output.loss.detach()
            metrics.append(output.metrics)
        grads = [p.grad.clone() for p in head.parameters() if p.grad is not None]
        return [total, *grads], add_metrics(metrics)

    everything, metrics = run([list(range(9))])
    for parts in (
        [[8, 3, 1, 0, 2, 7, 6, 5, 4]],
        [[0], [1, 2, 3], [4], [5, 6], [7, 8]],
        [[4, 2], [5, 1, 0, 3], [8, 6, 7]],
    ):
        split, split_metrics = run(parts)
        for actual, expected in zip(split, everything, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
        for name, value in metrics.items():
            torch.testing.assert_close(split_metrics[name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_logprobs_come_from_the_same_pass(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack(ragged_documents())
    head = padded_head(losses={"policy": LOSSES["gspo"]}, strategy=strategy, metrics=False)
    hidden = content_hidden(batch)
    passes: list[object] = []

    def counted(*arguments: object, **options: object) -> object:
        passes.append(arguments)
        return check_inputs(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("fastrl.layers.head_pass.check_inputs", counted)
        output = head(hidden, batch, return_logprobs=True)
    assert len(passes) == 1
    assert output.strategy == strategy
    assert output.logprobs is not None
    assert output.entropy is not None
    assert not output.logprobs.requires_grad
    head.eval()
    evaluated = head(hidden, batch)
    assert evaluated.loss is None
    torch.testing.assert_close(output.logprobs, evaluated.logprobs)
    torch.testing.assert_close(output.entropy, evaluated.entropy)
    assert evaluated.logprobs[batch.labels == -100].count_nonzero() == 0
    assert evaluated.logprobs[batch.labels != -100].max() < 0


def test_no_grad_computes_the_loss_alone() -> None:
    batch = pack(ragged_documents())
    head = padded_head(losses={"policy": LOSSES["grpo"]})
    with torch.no_grad():
        output = head(content_hidden(batch), batch)
    assert not output.loss.requires_grad
    torch.testing.assert_close(output.loss, head(content_hidden(batch), batch).loss.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_two_backwards_of_one_graph(
    strategy: str, dtype: torch.dtype, device: torch.device
) -> None:
    batch = grpo_batch(4, 60, 500, device=device)
    head = grpo_head(64, 500, device=device, strategy=strategy).to(dtype)
    hidden = torch.randn(batch.num_tokens, 64).to(device, dtype).requires_grad_()
    inputs = (hidden, head.weight)
    loss = head(hidden, batch).loss
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    (4 * loss).backward(retain_graph=True)  # not 1: scaling in place would show in what follows
    second = torch.autograd.grad(-2 * loss, inputs, retain_graph=True)
    (loss * -2).backward()
    once = torch.autograd.grad(head(hidden, batch).loss, inputs)
    for grads in zip(inputs, once, first, second, strict=True):
        total, alone, one, minus_two = grads
        assert torch.equal(-2 * one, minus_two)
        torch.testing.assert_close(total.grad, 2 * alone)


def test_auto_takes_one_pass_where_documents_are_whole_and_fit() -> None:
    documents = ragged_documents()
    hand_made = pack(documents)
    hidden = content_hidden(hand_made)

    def strategy(loss: str, **options: object) -> str | None:
        whole = bool(options.pop("whole", True))
        head = padded_head(losses={"policy": LOSSES[loss]}, **options)
        result: str | None = head(hidden, hand_made.replace(whole_documents=whole)).strategy
        return result

    assert strategy("grpo") == "single_pass"
    assert strategy("gspo") == "single_pass"
    assert strategy("gspo", whole=False) == "recompute"
    assert strategy("grpo", whole=False) == "single_pass"
    assert strategy("grpo", chunk_size=2) == "recompute"
    assert strategy("grpo", max_logits_bytes=64) == "recompute"
    with pytest.raises(ValueError, match="split over ranks or micro-sequences"):
        strategy("gspo", whole=False, strategy="single_pass")
    with pytest.raises(ValueError, match="more rows than"):
        strategy("gspo", chunk_size=2, strategy="single_pass")


def test_batches_made_by_hand_need_no_row_sets() -> None:
    batch = pack(ragged_documents())
    head = padded_head(losses={"policy": LOSSES["gspo"]})
    hidden = content_hidden(batch)
    bare = batch.replace(labelled_rows=None, active_rows=None, active_document_rows=None)
    expected = gradients(head(hidden, batch).loss, head, hidden)
    for actual, wanted in zip(
        gradients(head(hidden, bare).loss, head, hidden), expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


def test_a_loss_says_what_the_batch_lacks() -> None:
    batch = pack(ragged_documents())
    head = padded_head(losses={"policy": LOSSES["grpo"]})
    with pytest.raises(ValueError, match=r"`old_logprobs` must be in the batch for the GRPOLoss"):
        head(content_hidden(batch), batch.replace(old_logprobs=None))
    with pytest.raises(ValueError, match=r"`advantages` must be in the batch"):
        head(content_hidden(batch), batch.replace(advantages=None))


def test_l21_a_loss_scale_keeps_small_gradients_in_fp16() -> None:
    """`single_pass` would round dz, some 1e-9 here, before the scale is known."""
    documents = [Document(tokens=[1, 2, 3], prompt_length=1, advantage=1e-4, logprobs=[-2.0, -2.0])]
    batch = pack(documents)
    assert batch.advantages is not None
    for strategy, is_exact in (("auto", True), ("single_pass", False)):
        losses = {"policy": {"type": "grpo"}}
        config = LanguageModelHeadConfig.model_validate(
            {"hidden_size": 4, "vocab_size": 8, "strategy": strategy, "losses": losses}
        )
        head = LanguageModelHead(config, dtype=torch.float16)
        hidden = torch.zeros(batch.num_tokens, 4, dtype=torch.float16, requires_grad=True)
        output = head(hidden, batch.replace(advantages=batch.advantages * 1e-4))
        assert output.strategy == ("recompute" if is_exact else "single_pass")
        (grad,) = torch.autograd.grad(output.loss * 2.0**30, hidden)
        assert (grad.abs().max() > 0).item() == is_exact


def fp16_gradient(loss: str, strategy: str, labels_of_step: int, dtype: torch.dtype) -> Tensor:
    """dh of a micro-batch of a step of many labels, under the scale of a GradScaler."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(512, (8, 33), generator=generator)
    old = -6.2 + 0.3 * torch.randn(8, 32, generator=generator)
    documents = [
        Document(row, prompt_length=1, logprobs=old[number], advantage=1.5 - number % 4)
        for number, row in enumerate(tokens)
    ]
    counts = BatchCounts(labels_of_step, labels_of_step // 32)
    (batch,) = TokenBatch.from_documents(documents).to_kwargs(counts=counts)
    config = {"hidden_size": 64, "vocab_size": 512, "strategy": strategy, "chunk_size": 64}
    losses = {"policy": {"type": loss, "epsilon_low": 0.9, "epsilon_high": 4.0}}
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config | {"losses": losses}))
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(512, 64, generator=generator))
    head.half().to(dtype)
    hidden = torch.randn(batch.num_tokens, 64, generator=generator).half().to(dtype)
    output = head(hidden.requires_grad_(), batch)
    (grad,) = torch.autograd.grad(output.loss * 2.0**16, hidden)
    if strategy == "auto" and dtype == torch.float16:
        assert output.strategy == "recompute"
    return grad.double()


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
@pytest.mark.parametrize("labels_of_step", [2**16, 2**18, 2**20])
def test_l21_gradients_of_large_steps_keep_their_digits_in_fp16(
    loss: str, labels_of_step: int
) -> None:
    """`single_pass` has errors of 1e-2 to 4e-1 there, as the docs say."""
    exact = fp16_gradient(loss, "recompute", labels_of_step, torch.float64)
    for strategy, bounds in (("auto", (0, 1e-3)), ("single_pass", (4e-3, 1.0))):
        grad = fp16_gradient(loss, strategy, labels_of_step, torch.float16)
        error = ((grad - exact).norm() / exact.norm()).item()
        assert bounds[0] <= error < bounds[1], strategy


def test_dropping_clipped_rows_changes_nothing() -> None:
    batch = pack(ragged_documents())
    results = []
    for drop in (False, True):
        head = padded_head(
            losses={"policy": {"type": "grpo", "epsilon_low": 0.01, "epsilon_high": 0.01}},
            strategy="recompute",
            drop_inactive_rows=drop,
        )
        hidden = content_hidden(batch)
        results.append(gradients(head(hidden, batch).loss, head, hidden))
    for every, dropped in zip(*results, strict=True):
        torch.testing.assert_close(every, dropped, atol=1e-13, rtol=1e-13)
    with pytest.raises(ValueError, match="`drop_inactive_rows` must not be given with"):
        padded_head(losses={}, strategy="single_pass", drop_inactive_rows=True)


def test_a_used_up_graph_says_so() -> None:
    batch = pack(ragged_documents())
    head = padded_head(losses={"policy": LOSSES["grpo"]}, strategy="single_pass")
    loss = head(content_hidden(batch), batch).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


def test_autocast_leaves_a_pass_in_fp32() -> None:
    batch = pack(ragged_documents())
    config = LanguageModelHeadConfig(
        hidden_size=64, vocab_size=40, strategy="single_pass", losses={"policy": GRPOLossConfig()}
    )
    head = LanguageModelHead(config)
    hidden = torch.randn(batch.num_tokens, 64, requires_grad=True)
    exact = gradients(head(hidden, batch).loss, head, hidden)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients(head(hidden, batch).loss, head, hidden)
    for actual, expected in zip(cast, exact, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-5)


def test_a_new_head_starts_like_a_new_model() -> None:
    sizes = {"hidden_size": 64, "vocab_size": 1000}
    config = LanguageModelHeadConfig.model_validate(sizes | {"bias": True})
    llama = Llama(LlamaConfig.model_validate(sizes | {"num_hidden_layers": 1}))
    for head in (LanguageModelHead(config), llama.lm_head):
        assert head.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert head.bias is None or not head.bias.any()


class _FirstRows(CrossEntropyLoss):
    """Cross-entropy of some rows, which it names in a set of its own."""

    places = slice(0, 3)

    def gradient_rows(self, batch: BatchKwargs) -> RowSet:
        mask = torch.zeros_like(batch.labels, dtype=torch.bool)
        mask[batch.rows_with_labels.index[self.places]] = True
        return RowSet.from_mask(mask, batch.document_index)

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        """The negative log-probabilities of the rows that `tokens` mark."""
        chosen = torch.where(batch.tokens == self.mark, -statistics.logprobs, 0)
        total: Tensor = self.normalise(chosen, batch)
        return total

    mark = 1


class _LastRows(_FirstRows):
    places = slice(-3, None)
    mark = 2


def test_losses_of_rows_of_their_own_add_up() -> None:
    """Neither set holds the other, so the head must take in all labelled rows."""
    batch = pack(ragged_documents())
    labelled = batch.rows_with_labels.index
    tokens = torch.zeros_like(batch.tokens)
    tokens[labelled[_FirstRows.places]], tokens[labelled[_LastRows.places]] = 1, 2
    batch = batch.replace(tokens=tokens)
    head = padded_head(losses={}, metrics=False)
    hidden = content_hidden(batch)
    parts = {
        "first": _FirstRows(CrossEntropyLossConfig()),
        "last": _LastRows(CrossEntropyLossConfig()),
    }

    def loss_of(losses: dict[str, Any]) -> Tensor:
        head.losses = losses
        total: Tensor = head(hidden, batch).loss
        return total

    alone = sum(loss_of({name: loss}) for name, loss in parts.items())
    torch.testing.assert_close(loss_of(parts), alone)
