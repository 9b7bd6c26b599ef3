"""The KL in rewards against its definition in plain loops, rollouts of several rows included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fastrl import Document
from fastrl.data.reward_kl import with_kl_in_rewards, with_kl_to_go
from tests.helpers.loss_documents import policy_documents

COEFFICIENT = 0.3
BOUND = 0.35


def rollouts() -> list[Document]:
    """Rollouts of one and of several rows; one is unscored."""
    documents = policy_documents()
    ids = ["one", "one", "two", "three", "two", "three", "four", "five", "five", "six"]
    rewards = {name: 0.5 * number for number, name in enumerate(dict.fromkeys(ids))}
    return [
        replace(document, rollout_id=name, group_id="g", reward=rewards[name])
        if name != "six"
        else replace(document, rollout_id=name, reward=None, advantage=None)
        for name, document in zip(ids, documents, strict=True)
    ]


def learned(document: Document) -> list[int]:
    """Positions of the tokens to be learned: the first token of a document has no label."""
    if document.loss_mask is not None:
        return [i for i, is_learned in enumerate(document.loss_mask) if is_learned and i]
    assert document.prompt_length is not None
    return list(range(max(document.prompt_length, 1), len(document.tokens)))


def estimate(document: Document, position: int, estimator: str) -> float:
    assert document.logprobs is not None
    assert document.ref_logprobs is not None
    difference = float(document.logprobs[position]) - float(document.ref_logprobs[position])
    if estimator == "k3":
        difference = math.expm1(-difference) + difference
    return min(max(difference, -BOUND), BOUND)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_rewards_pay_for_all_rows_of_their_rollout(estimator: str) -> None:
    documents = rollouts()
    found = with_kl_in_rewards(documents, COEFFICIENT, estimator=estimator, bound=BOUND)
    for document, paid in zip(documents, found, strict=True):
        if document.reward is None:
            assert paid.reward is None
            continue
        total = 0.0
        for other in documents:
            if other.rollout_id == document.rollout_id:
                for position in learned(other):
                    total += estimate(other, position, estimator)
        assert paid.reward == pytest.approx(document.reward - COEFFICIENT * total, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_advantages_pay_for_what_is_to_come_in_later_rows_too(estimator: str) -> None:
    documents = rollouts()
    found = with_kl_to_go(documents, COEFFICIENT, estimator=estimator, bound=BOUND)
    for number, (document, paid) in enumerate(zip(documents, found, strict=True)):
        if document.advantage is None:
            assert paid == document
            continue
        for position in learned(document):
            to_come = 0.0
            for later, other in enumerate(documents):
                if other.rollout_id == document.rollout_id:
                    for at in learned(other):
                        if (later, at) >= (number, position):
                            to_come += estimate(other, at, estimator)
            before = advantage(document, position)
            assert advantage(paid, position) == pytest.approx(
                before - COEFFICIENT * to_come, abs=1e-12
            )


def advantage(document: Document, position: int) -> float:
    value = document.advantage
    if isinstance(value, Sequence):
        return float(value[position])
    assert value is not None
    return float(value)
