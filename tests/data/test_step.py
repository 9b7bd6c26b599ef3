"""An optimizer step in micro-batches is the step in one pass; what would not be is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastrl import (
    BatchKwargs,
    Document,
    LanguageModelHead,
    OptimizerStep,
    TokenBatch,
    add_metrics,
    reduce_metrics,
)
from fastrl.data.documents import DocumentError
from fastrl.data.equal_batches import equal_batches
from tests.helpers.batches import HIDDEN_SIZE, VOCAB_SIZE, padded_head, ragged_documents

COLUMNS = ("advantages", "old_logprobs")
LOSSES: dict[str, Any] = {
    "grpo": {"type": "grpo", "entropy": {"bonus": 0.1}},
    "gspo": {"type": "gspo", "normalisation": "documents"},
    "by group": {"type": "grpo", "normalisation": "groups"},
    "cross_entropy": {"type": "cross_entropy"},
}


class Model(nn.Module):
    """A body of two tables and a head."""

    def __init__(self, loss: dict[str, Any]) -> None:
        super().__init__()
        self.head = padded_head(losses={"policy": loss})
        generator = torch.Generator().manual_seed(11)

        def table(rows: int) -> nn.Parameter:
            values = torch.randn(rows, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
            return nn.Parameter(values)

        self.by_token, self.by_position = table(VOCAB_SIZE), table(64)

    def forward(self, batch: BatchKwargs) -> Any:
        hidden = self.by_token[batch.tokens] + self.by_position[batch.positions]
        return self.head(hidden, batch, return_logprobs=True)

    def grads(self) -> list[Tensor]:
        grads = [parameter.grad for parameter in self.parameters()]
        self.zero_grad()
        return [grad for grad in grads if grad is not None]


def _documents() -> list[Document]:
    return [
        replace(document, reward=0.25 * number, group_id=number // 3)
        for number, document in enumerate(ragged_documents())
    ]


def _run(model: Model, step: OptimizerStep) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Metrics, gradients of 0.7 times the loss, log-probabilities of the documents."""
    logprobs = []
    for batch in step:
        output = model(batch)
        (0.7 * output.loss).backward()
        step.add(output)
        logprobs.append(output.logprobs)
    metrics = step.finish(model.head.loss_groups)
    return metrics, model.grads(), list(step.split_by_document(logprobs))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("max_tokens", [11, 20])
def test_b3_micro_batches_are_the_single_pass(loss: str, max_tokens: int) -> None:
    model = Model(LOSSES[loss])
    documents = _documents()
    (whole,) = TokenBatch.from_documents(documents).to_kwargs()
    output = model(whole)
    (0.7 * output.loss).backward()
    expected = {"loss": output.loss.detach(), **reduce_metrics(output.metrics, ())}
    gradients = model.grads()

    step = OptimizerStep.from_documents(documents, max_tokens=max_tokens, pad_to_multiple=4)
    assert len(step) > 2
    assert len({batch.padded_length for batch in step.batches}) > 1
    for _ in range(2):  # a step can be run again
        metrics, found, logprobs = _run(model, step)
        assert list(metrics) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(metrics[name], value.double(), rtol=1e-12, atol=1e-12)
        for mine, single in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, single, rtol=0, atol=1e-12)
        by_document = TokenBatch.from_documents(documents).split_by_document(output.logprobs)
        for value, single in zip(logprobs, by_document, strict=True):
            torch.testing.assert_close(value, single, rtol=0, atol=1e-12)


def test_b3_each_micro_batch_on_its_own_is_another_loss() -> None:
    """What the step is for: without its counts a loop gives the sum of several steps."""
    model = Model(LOSSES["grpo"])
    step = OptimizerStep.from_documents(_documents(), max_tokens=20)
    right = sum(model(batch).loss.item() for batch in step)
    wrong = sum(model(batch.to_kwargs()[0]).loss.item() for batch in step.batches)
    assert abs(wrong - right) > 0.1 * abs(right)


def test_batches_of_ones_own_and_micro_sequences() -> None:
    model = Model(LOSSES["grpo"])
    documents = _documents()
    batches = [
        TokenBatch.from_documents(part, columns=COLUMNS) for part in (documents[:4], documents[4:])
    ]
    step = OptimizerStep(batches)
    metrics, gradients, _ = _run(model, step)
    for batch in step.batches:
        outputs = [model(piece) for piece in step.to_kwargs(batch, 3)]
        (0.7 * torch.stack([output.loss for output in outputs]).sum()).backward()
        step.add(*outputs)
    in_pieces = step.finish(())
    assert list(in_pieces) == list(metrics)
    for name, value in metrics.items():
        torch.testing.assert_close(in_pieces[name], value, rtol=1e-12, atol=1e-12)
    for mine, single in zip(model.grads(), gradients, strict=True):
        torch.testing.assert_close(mine, single, rtol=0, atol=1e-12)


def test_a_step_without_documents() -> None:
    step = OptimizerStep.from_documents([], max_tokens=4)
    assert (len(step), list(step), step.finish(())) == (0, [], {})
    assert (step.counts.num_labels_in_batch, step.counts.num_documents_in_batch) == (0, 0)
    assert step.split_by_document([]) == ()


def test_an_empty_micro_batch_takes_any_loss_and_changes_nothing() -> None:
    model = Model({"type": "grpo", "normalisation": "groups", "kl": {"coefficient": 0.1}})
    logprobs = [-3.0, -3.1]
    document = Document(
        [1, 2, 3],
        prompt_length=1,
        logprobs=logprobs,
        ref_logprobs=logprobs,
        rollout_logprobs=logprobs,
        advantage=1.0,
        reward=1.0,
        model_version=3,
        group_id="a",
        kept_tokens=[[2], [3, 4]],
    )
    (batch,) = OptimizerStep.from_documents([document], max_tokens=4).batches
    empty = equal_batches([TokenBatch.from_documents([]), batch], pad_to_multiple=4)[0]
    assert empty.padded_length == 0
    alone, beside = OptimizerStep([batch]), OptimizerStep([batch, empty])
    expected = _run(model, alone)
    metrics, gradients, _ = _run(model, beside)
    (_, kwargs) = beside
    assert kwargs.kept_tokens is not None
    assert kwargs.model_version is not None
    assert list(metrics) == list(expected[0])
    for name, value in expected[0].items():
        assert torch.equal(metrics[name], value), name
    assert all(map(torch.equal, gradients, expected[1]))


def test_documents_that_lack_a_reward_give_the_same_metrics() -> None:
    scored = Document([1, 2], prompt_length=1, logprobs=[-3.0], advantage=1.0, reward=1.0)
    plain = replace(scored, reward=None)
    model = Model(LOSSES["grpo"])
    step = OptimizerStep.from_documents([scored, plain], max_tokens=2)
    names = [set(model(batch).metrics) for batch in step]
    assert names[0] == names[1]
    assert "policy/reward" in names[0]


def test_fp32_and_float64_micro_batches_add_up() -> None:
    plain = Document([1, 2], prompt_length=1, logprobs=[-3.0], advantage=1.0)
    exact = replace(plain, logprobs=torch.tensor([-3.0], dtype=torch.float64))
    model = Model(LOSSES["grpo"]).float()
    metrics = _run(model, OptimizerStep.from_documents([plain, exact], max_tokens=2))[0]
    expected = _run(model, OptimizerStep.from_documents([plain, plain], max_tokens=2))[0]
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name].double(), value.double(), rtol=1e-6, atol=1e-6)


def test_an_error_names_the_document_among_all() -> None:
    good = Document([1, 2, 3], prompt_length=1, logprobs=[-1.0, -2.0])
    bad = replace(good, logprobs=[-1.0])
    with pytest.raises(DocumentError, match=r"document 2: `logprobs` must have 3"):
        OptimizerStep.from_documents([good, good, bad], max_tokens=3)
    with pytest.raises(DocumentError, match="document 1: `tokens` must have at most 2"):
        OptimizerStep.from_documents([replace(good, tokens=[1]), good], max_tokens=2)
    with pytest.raises(DocumentError, match="document 1: `ref_logprobs` is required"):
        OptimizerStep.from_documents([replace(good, ref_logprobs=[-1.0, -2.0]), good], max_tokens=3)
    with pytest.raises(ValueError, match="`pad_to_multiple` must be at least 1"):
        OptimizerStep.from_documents([good], max_tokens=3, pad_to_multiple=0)


def test_a_forgotten_or_doubled_output_is_refused() -> None:
    model = Model(LOSSES["cross_entropy"])
    step = OptimizerStep.from_documents(_documents(), max_tokens=20)
    outputs = [model(batch) for batch in step]
    for output in outputs[1:]:
        step.add(output)
    told = rf"once for each of the {len(step)} micro-batches before `finish`, got {len(step) - 1}"
    with pytest.raises(ValueError, match=told):
        step.finish(())
    step.add(outputs[0])
    step.add(outputs[0])
    with pytest.raises(ValueError, match=rf"got {len(step) + 1} calls"):
        step.finish(())


def test_what_is_no_output_no_batch_and_no_document_is_refused() -> None:
    document = Document([1, 2, 3], prompt_length=1)
    batch = TokenBatch.from_documents([document])
    step = OptimizerStep([batch])
    outputs: list[Any] = [{"a": torch.ones(())}, torch.ones(()), (None, None), nn.Identity()]
    for output in outputs:
        with pytest.raises(TypeError, match="`output` must be what the head gives"):
            step.add(output)
    make: Any = OptimizerStep
    batches: list[Any] = [batch, [document], [(batch,)]]
    for wrong, got in zip(batches, ("TokenBatch", "Document", "tuple"), strict=True):
        told = f"`batches` must be a sequence of TokenBatch, got a {got}"
        with pytest.raises(TypeError, match=told):
            make(wrong)
    documents: list[Any] = [document, [batch], nn.Identity()]
    for wrong, got in zip(documents, ("Document", "TokenBatch", "Identity"), strict=True):
        told = f"`documents` must be a sequence of Document, got a {got}"
        with pytest.raises(TypeError, match=told):
            make.from_documents(wrong, max_tokens=4)
    with pytest.raises(ValueError, match=r"must have one tensor a micro-batch \(1\), got 2"):
        step.split_by_document([torch.zeros(3)] * 2)
    with pytest.raises(TypeError, match=r"`groups` must be a sequence .* got a LanguageModelHead"):
        reduce_metrics({}, padded_head())  # type: ignore[arg-type]


def test_b5_a_head_in_evaluation_mode_is_named() -> None:
    head: LanguageModelHead = padded_head(losses={"a": LOSSES["cross_entropy"]}).eval()
    step = OptimizerStep.from_documents([Document([1, 2], prompt_length=1)], max_tokens=2)
    for batch in step:
        output = head(torch.zeros(2, HIDDEN_SIZE, dtype=torch.float64), batch)
        with pytest.raises(ValueError, match=r"`loss` .* got None, .* call `train\(\)`"):
            step.add(output)


def test_metrics_of_parts_add_up_by_their_names() -> None:
    parts = [
        {
            "a": torch.tensor(float(i)),
            "a_max": torch.tensor(-1.0 * i),
            "a_min": torch.tensor(2.0 * i),
        }
        for i in (1, 2)
    ]
    assert {name: value.item() for name, value in add_metrics(parts).items()} == {
        "a": 3.0,
        "a_max": -1.0,
        "a_min": 2.0,
    }
