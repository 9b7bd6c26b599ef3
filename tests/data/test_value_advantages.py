"""Advantages from values: against their definition, and what documents they are refused for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastrl import Document, TokenBatch
from fastrl.data.documents import DocumentError
from fastrl.data.value_advantages import generalised_advantages, with_value_advantages
from fastrl.functional.reference import heads as reference

VALUES = [0.3, -0.7, 1.1, 0.2, 0.9]


def made_of(*documents: Document, **options: Any) -> list[tuple[list[float], list[float]]]:
    """Advantages and returns of the labels."""
    batches = [
        TokenBatch.from_documents([document]).columns
        for document in with_value_advantages(documents, **options)
    ]
    names = ("advantages", "returns")
    return [tuple(batch[name][1:6].tolist() for name in names) for batch in batches]  # type: ignore[misc]


def scored(**fields: Any) -> Document:
    values = torch.tensor(VALUES, dtype=torch.float64)
    return Document([4, 1, 5, 2, 3, 6, 7], 2, values=values, reward=1.5, **fields)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_the_recursion_is_the_sum(gamma: float, lam: float) -> None:
    rewards = [0.0, 0.5, 0.0, -1.0, 2.0]
    found = generalised_advantages(rewards, VALUES, gamma=gamma, lam=lam)
    assert found == pytest.approx(reference.advantages(rewards, VALUES, gamma, lam), abs=1e-12)
    assert generalised_advantages([], []) == []


def test_the_reward_counts_at_the_last_label_whatever_the_alignment() -> None:
    rewards = [0.0] * 4 + [1.5]
    wanted = reference.advantages(rewards, VALUES, 0.9, 0.8)
    returns = [a + v for a, v in zip(wanted, VALUES, strict=True)]
    values = torch.tensor([0.0, 0.0, *VALUES], dtype=torch.float64)
    by_label = replace(scored(), values=values[1:], alignment="label")
    for document in (scored(), replace(scored(), values=values), by_label):
        (made,) = with_value_advantages([document], gamma=0.9, lam=0.8)
        batch = TokenBatch.from_documents([made])
        learned = batch.labels != -100
        assert batch.columns["advantages"].dtype == torch.float64
        assert batch.columns["advantages"][learned].tolist() == pytest.approx(wanted, abs=1e-12)
        assert batch.columns["returns"][learned].tolist() == pytest.approx(returns, abs=1e-12)
        assert batch.columns["values"][learned].tolist() == VALUES


def test_tokens_that_are_not_learned_are_passed_over() -> None:
    mask = [False, False, True, True, False, False, True]
    values = torch.tensor([9.0, 9.0, 0.3, -0.7, 9.0, 9.0, 1.1], dtype=torch.float64)
    document = replace(scored(), prompt_length=None, loss_mask=mask, values=values)
    (made,) = with_value_advantages([document], gamma=0.9, lam=0.8)
    wanted = reference.advantages([0.0, 0.0, 1.5], VALUES[:3], 0.9, 0.8)
    columns = TokenBatch.from_documents([made]).columns
    assert columns["advantages"].tolist() == pytest.approx(
        [0.0, wanted[0], wanted[1], 0.0, 0.0, wanted[2], 0.0], abs=1e-12
    )


def test_returns_may_have_a_lambda_of_their_own_and_advantages_one_of_the_length() -> None:
    rewards = [0.0] * 4 + [1.5]
    ((found, returns),) = made_of(scored(), returns_lam=1.0, length_alpha=0.5)
    wanted = reference.advantages(rewards, VALUES, 1.0, 1 - 1 / (0.5 * 5))
    assert found == pytest.approx(wanted, abs=1e-12)
    assert returns == pytest.approx([1.5] * 5, abs=1e-12)  # the whole return
    ((found, _),) = made_of(scored(), length_alpha=0.1)
    assert found == pytest.approx(reference.advantages(rewards, VALUES, 1.0, 0.0), abs=1e-12)


def test_whitening_is_over_all_labels() -> None:
    documents = [scored(), replace(scored(), reward=-2.0), replace(scored(), reward=0.25)]
    plain, made = made_of(*documents), made_of(*documents, whiten=True)
    every = torch.tensor([found for found, _ in plain], dtype=torch.float64)
    wanted = (every - every.mean()) / (every.var() + 1e-8).sqrt()
    found = torch.tensor([found for found, _ in made], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    assert [returns for _, returns in made] == [returns for _, returns in plain]
    ((flat, _),) = made_of(replace(scored(), values=[1.5] * 5), whiten=True)
    assert flat == [0.0] * 5


def test_a_document_without_reward_is_not_learned() -> None:
    for reward in (None, math.nan):
        (made,) = with_value_advantages([replace(scored(), reward=reward)])
        assert made.num_labels == 0
        assert (made.values, made.returns, made.advantage) == (None, None, None)


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(DocumentError, match="`values` is required for advantages from values"):
        with_value_advantages([replace(scored(), values=None)])
    parts = [scored(group_id=1, rollout_id=3), scored(group_id=1, rollout_id=3)]
    with pytest.raises(DocumentError, match="`rollout_id` must be that of one document"):
        with_value_advantages(parts)
    assert with_value_advantages(parts[:1])[0].returns is not None
    with pytest.raises(ValueError, match="`lam` must not be given with `length_alpha`"):
        with_value_advantages([scored()], lam=0.9, length_alpha=0.05)
    wrong: list[dict[str, Any]] = [{"gamma": 1.1}, {"lam": -0.1}, {"returns_lam": 2.0}]
    for options in wrong:
        with pytest.raises(ValueError, match="must be from 0 to 1, got"):
            with_value_advantages([scored()], **options)
    with pytest.raises(ValueError, match="`length_alpha` must be above 0"):
        with_value_advantages([scored()], length_alpha=0.0)
    with pytest.raises(ValueError, match="`rewards` must have one a value"):
        generalised_advantages([1.0], [])
