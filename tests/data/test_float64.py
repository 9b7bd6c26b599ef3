"""Documents of float64 values keep them in a batch; all others are fp32 there, as ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fastrl import BatchKwargs, Document, TokenBatch
from fastrl.data.advantages import with_kl_in_rewards
from fastrl.data.documents import DocumentError
from tests.helpers.batches import content_hidden, padded_head, reference_loss

THIRD = 1 / 3  # no fp32 number
FP32_THIRD = float(np.float32(THIRD))
DOCUMENT = Document([1, 2, 3], prompt_length=1, logprobs=[-THIRD, -0.1], advantage=THIRD)


def _kwargs(*documents: Document) -> BatchKwargs:
    (kwargs,) = TokenBatch.from_documents(documents, pad_to_multiple=4).to_kwargs()
    return kwargs


def _values(kwargs: BatchKwargs) -> dict[str, Any]:
    names = ("advantages", "old_logprobs")
    return {name: (getattr(kwargs, name).dtype, getattr(kwargs, name).tolist()) for name in names}


@pytest.mark.parametrize(
    "logprobs",
    [
        torch.tensor([-THIRD, -0.1], dtype=torch.float64),
        np.array([-THIRD, -0.1]),
    ],
)
def test_a_float64_document_stays_float64_with_its_python_numbers(logprobs: Any) -> None:
    document = replace(DOCUMENT, logprobs=logprobs, reward=THIRD, temperature=0.7)
    other = replace(DOCUMENT, temperature=1.1)
    kwargs = _kwargs(document, other)
    fp32_tenth = float(np.float32(-0.1))
    assert _values(kwargs) == {
        "advantages": (torch.float64, [THIRD, THIRD, 0, FP32_THIRD, FP32_THIRD, 0, 0, 0]),
        "old_logprobs": (torch.float64, [-THIRD, -0.1, 0, -FP32_THIRD, fp32_tenth, 0, 0, 0]),
    }
    assert isinstance(kwargs.temperature, torch.Tensor)
    assert kwargs.temperature.tolist() == [0.7] * 3 + [1.1] * 3 + [1.0] * 2
    assert kwargs.rewards is not None
    assert kwargs.rewards[0].item() == THIRD


@pytest.mark.parametrize(
    "advantage",
    [torch.tensor(THIRD, dtype=torch.float64), np.array(THIRD), np.array([THIRD, THIRD])],
)
def test_an_advantage_may_be_what_is_float64(advantage: Any) -> None:
    kwargs = _kwargs(replace(DOCUMENT, advantage=advantage))
    assert _values(kwargs)["advantages"] == (torch.float64, [THIRD, THIRD, 0, 0])
    assert _values(kwargs)["old_logprobs"] == (torch.float64, [-THIRD, -0.1, 0, 0])


@pytest.mark.parametrize(
    "advantage", [THIRD, [THIRD] * 2, np.float64(THIRD), torch.tensor(THIRD), np.float32(THIRD)]
)
def test_python_numbers_and_fp32_are_fp32(advantage: Any) -> None:
    kwargs = _kwargs(replace(DOCUMENT, advantage=advantage, temperature=0.7), DOCUMENT)
    expected = [FP32_THIRD, FP32_THIRD, 0, FP32_THIRD, FP32_THIRD, 0, 0, 0]
    assert _values(kwargs)["advantages"] == (torch.float32, expected)
    assert isinstance(kwargs.temperature, torch.Tensor)
    assert kwargs.temperature.dtype == torch.float32


def test_float64_has_the_range_of_fp32() -> None:
    document = replace(DOCUMENT, advantage=np.array([1e39, 1.0]))
    with pytest.raises(DocumentError, match=r"`advantage` must be finite fp32 .* got 1e\+39"):
        TokenBatch.from_documents([document])


def test_a_reward_pays_for_its_divergence_in_float64() -> None:
    old, reference = np.array([-THIRD, -0.1]), np.array([-0.7, -0.3])
    document = replace(DOCUMENT, logprobs=old, ref_logprobs=reference, reward=1.0)
    (paid,) = with_kl_in_rewards([document], 0.5)
    assert paid.reward == pytest.approx(1 - 0.5 * float((old - reference).sum()), abs=1e-15)


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_the_loss_of_a_float64_batch_is_that_of_its_documents_values(loss: str) -> None:
    old = np.array([-3.3 - THIRD, -3.1, -3.4 + THIRD])
    documents = [
        Document([5, 3, 8, 1], prompt_length=1, logprobs=old, advantage=0.7),
        Document([5, 3, 7, 2], prompt_length=1, logprobs=old[::-1].copy(), advantage=-1.1),
    ]
    kwargs = _kwargs(*documents)
    head = padded_head(losses={"policy": {"type": loss, "epsilon_low": 0.9, "epsilon_high": 9.0}})
    hidden = content_hidden(kwargs)
    output = head(hidden, kwargs)
    output.loss.backward()
    # By the definition, from what the documents say.
    expected_hidden = hidden.detach().clone().requires_grad_()
    exact = kwargs.replace(
        advantages=torch.tensor([0.7] * 3 + [0.0] + [-1.1] * 3 + [0.0], dtype=torch.float64),
        old_logprobs=torch.tensor([*old, 0.0, *old[::-1], 0.0], dtype=torch.float64),
    )
    expected = reference_loss(head, expected_hidden, exact)
    expected.backward()
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-13)
    assert hidden.grad is not None
    assert expected_hidden.grad is not None
    torch.testing.assert_close(hidden.grad, expected_hidden.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_an_fp32_head_takes_a_float64_batch(strategy: str) -> None:
    exact = [replace(DOCUMENT, advantage=np.array(a)) for a in (THIRD, -0.5)]
    rounded = [replace(DOCUMENT, advantage=a) for a in (THIRD, -0.5)]
    head = padded_head(losses={"policy": {"type": "grpo"}}, strategy=strategy).float()
    results = []
    for documents in (exact, rounded):
        kwargs = _kwargs(*documents)
        hidden = content_hidden(kwargs).detach().float().requires_grad_()
        loss = head(hidden, kwargs).loss
        (0.7 * loss).backward()
        assert hidden.grad is not None
        assert hidden.grad.dtype == torch.float32
        results.append((loss.item(), hidden.grad))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1])


def test_a_reward_beside_a_float64_document_is_that_of_any_batch() -> None:
    wide = replace(DOCUMENT, logprobs=np.full(2, -THIRD), reward=THIRD)
    narrow = replace(DOCUMENT, logprobs=[-THIRD] * 2, reward=THIRD)
    alone = TokenBatch.from_documents([narrow]).rewards
    rewards = TokenBatch.from_documents([wide, narrow]).rewards
    assert alone is not None
    assert rewards is not None
    assert rewards.tolist() == [THIRD, alone.item()]
    assert alone.item() != THIRD
