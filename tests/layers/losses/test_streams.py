"""Streams: a loss sees its labels, weights and counts alone, in one pass with the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fastrl import BatchCounts, Document, LanguageModelHeadConfig, TokenBatch
from fastrl.config import CrossEntropyLossConfig
from fastrl.data.documents import DocumentError
from fastrl.functional.head import recompute
from fastrl.functional.streams import of_stream
from fastrl.layers.losses import CrossEntropyLoss
from tests.helpers.loss_documents import pack, policy_documents, random_statistics, with_weights
from tests.helpers.loss_heads import assert_equal_gradients, capped_head, random_hidden

LOSSES: dict[str, dict[str, Any]] = {
    "policy": {"type": "gspo", "normalisation": "documents", "entropy": {"bonus": 0.1}},
    "sft": {"type": "cross_entropy", "weight": 0.3},
    "teacher": {"type": "dppo", "on_policy_distillation": {"rewards": False}},
}
STREAMS = {"policy": "rl", "sft": "ce", "teacher": "distill"}


def of_one_stream(documents: list[Document], stream: str) -> list[Document]:
    """Documents whose labels are those of the stream."""
    result = []
    for document in documents:
        given, size = getattr(document, f"{stream}_weight"), len(document.tokens)
        weights = given if isinstance(given, list) else [given] * size
        learned = document.loss_mask
        if document.prompt_length is not None:
            learned = [position >= document.prompt_length for position in range(size)]
        assert learned is not None
        mask = [bool(a) and weight > 0 for a, weight in zip(learned, weights, strict=True)]
        result.append(replace(document, prompt_length=None, loss_mask=mask))
    return result


def with_ones(documents: list[Document]) -> list[Document]:
    """Weights that are 0 or 1."""

    def ones(given: Any) -> Any:
        return [float(x > 0) for x in given] if isinstance(given, list) else float(given > 0)

    names = ("rl_weight", "ce_weight", "distill_weight")
    return [replace(x, **{name: ones(getattr(x, name)) for name in names}) for x in documents]


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_each_loss_is_that_of_a_batch_of_its_stream_alone(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = with_ones(with_weights(policy_documents()))
    streamed = {name: {**loss, "stream": STREAMS[name]} for name, loss in LOSSES.items()}
    head = capped_head(streamed, strategy=strategy, chunk_size=12)
    hidden = random_hidden(pack(documents)).requires_grad_()
    passes: list[int] = []
    forward = recompute._running_statistics

    def counted(*arguments: Any) -> Tensor:
        passes.append(1)
        return forward(*arguments)

    monkeypatch.setattr(recompute, "_running_statistics", counted)
    output = head(hidden, pack(documents))
    assert len(passes) == (strategy == "recompute")  # all losses share one
    expected: list[Tensor] = []
    metrics: dict[str, Tensor] = {}
    for name, loss in LOSSES.items():
        alone = head
        alone.set_losses({name: capped_head({name: loss}).config.losses[name]})
        part = alone(hidden, pack(of_one_stream(documents, STREAMS[name])))
        expected.append(part.loss)
        metrics |= part.metrics
    assert_equal_gradients(head, hidden, output.loss, torch.stack(expected).sum(), 1e-10)
    assert output.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(output.metrics[name], value, rtol=1e-9, atol=1e-9)


def times(factor: float, given: Any) -> Any:
    """Weights times a factor."""
    return [factor * x for x in given] if isinstance(given, list) else factor * given


def test_weights_scale_and_do_not_count() -> None:
    documents = with_weights(policy_documents())
    loss = CrossEntropyLoss(CrossEntropyLossConfig(stream="ce"))
    results = []
    for factor in (1.0, 3.0):
        scaled = [replace(x, ce_weight=times(factor, x.ce_weight)) for x in documents]
        batch = pack(scaled)
        own = of_stream(batch, "ce")
        results.append((loss(random_statistics(batch), own), own.num_labels_in_batch))
    (first, labels), (second, more) = results
    torch.testing.assert_close(3 * first, second)
    assert labels == more == int((batch.ce_weights != 0).sum())  # type: ignore[union-attr]
    assert labels < batch.num_labels_in_batch


def test_counts_are_those_of_all_micro_batches() -> None:
    documents = with_weights(policy_documents())
    whole = BatchCounts.of([TokenBatch.from_documents(documents)])
    parts = [TokenBatch.from_documents(part) for part in (documents[:4], documents[4:])]
    counts = BatchCounts.of([*parts, TokenBatch.from_documents([])])
    assert counts.streams == whole.streams
    labels, with_label = counts.streams["rl"]
    found = pack(documents)
    assert labels == int((found.rl_weights != 0).sum())  # type: ignore[union-attr]
    indices = found.document_index[found.rl_weights != 0]
    assert with_label == len(indices.unique()) < len(documents)
    (kwargs,) = parts[0].to_kwargs(counts=counts)
    assert kwargs.stream_counts["rl"].num_labels_in_batch == labels
    moved = kwargs.sent_to("cpu", pin_memory=False)
    torch.testing.assert_close(
        moved.stream_counts["ce"].label_counts, kwargs.stream_counts["ce"].label_counts
    )
    assert BatchCounts.of([TokenBatch.from_documents(policy_documents())]).streams == {
        "rl": (0, 0),
        "ce": (0, 0),
        "distill": (0, 0),
    }


def test_what_means_nothing_is_refused() -> None:
    documents = policy_documents()
    hidden = random_hidden(pack(documents))
    head = capped_head({"sft": {"type": "cross_entropy", "stream": "ce"}})
    with pytest.raises(ValueError, match="`ce_weights` must be in the batch for a loss of"):
        head(hidden, pack(documents))
    batch = pack(with_weights(documents))
    assert head(hidden, batch).loss > 0
    with pytest.raises(ValueError, match="`stream_counts` must have 'ce' beside `ce_weights`"):
        head(hidden, batch.replace(stream_counts={}))
    with pytest.raises(ValueError, match="`batch` must be that of `stream: ce`"):
        head.losses["sft"](random_statistics(batch), batch)
    with pytest.raises(DocumentError, match=r"document 0: `rl_weight` must be at least 0, got -1"):
        TokenBatch.from_documents([replace(documents[0], rl_weight=-1.0)])
    lacking = [replace(documents[0], rl_weight=1.0), documents[1]]
    with pytest.raises(DocumentError, match="document 1: `rl_weight` is required, as document 0"):
        TokenBatch.from_documents(lacking)
    for loss, message in (
        ({"type": "dpo", "stream": "rl"}, "`stream: rl` must not go with `normalisation: groups`"),
        ({"type": "grpo", "stream": "sft"}, "stream"),
        (
            {"type": "grpo", "kl": {"coefficient": 1}, "on_policy_distillation": {}},
            "`kl` must not be given with `on_policy_distillation`",
        ),
    ):
        with pytest.raises(ValidationError, match=message):
            LanguageModelHeadConfig.model_validate(
                {"hidden_size": 4, "vocab_size": 9, "losses": {"x": loss}}
            )
