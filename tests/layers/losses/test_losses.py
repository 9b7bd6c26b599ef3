"""Each loss and option on [T] vectors: against the definition, numerically, and split."""

from __future__ import annotations

import random
from operator import itemgetter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fastrl import BatchCounts, BatchKwargs, TokenBatch, TokenStatistics
from fastrl.config import PolicyGradientLossConfig
from fastrl.layers.losses import add_metrics, finish_metrics
from tests.helpers.frozen_detach import with_frozen_detach
from tests.helpers.loss_cases import CASES, LossCase
from tests.helpers.loss_documents import (
    UNLIKELY,
    pack,
    policy_documents,
    random_statistics,
    reference_tokens,
    widen,
)

UPSTREAM = -1.7


def gradients(loss: Tensor, statistics: TokenStatistics) -> list[Tensor]:
    """With respect to every vector, with an upstream gradient that is not 1."""
    leaves = statistics.vectors()
    upstream = torch.tensor(UPSTREAM, dtype=loss.dtype)
    grads = torch.autograd.grad(loss, leaves, upstream, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, grads, strict=True)
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_and_gradient_are_the_definition(case: LossCase) -> None:
    batch = case.batch()
    statistics = random_statistics(batch)
    loss = case.loss()(statistics, batch)
    expected = case.reference(reference_tokens(statistics, batch))
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    actual_grads = gradients(loss, statistics)
    assert any(grad.count_nonzero() for grad in actual_grads)
    for actual, wanted in zip(actual_grads, gradients(expected, statistics), strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-10)
        assert actual[batch.labels == -100].count_nonzero() == 0


POLICY_LOSSES = sorted(
    {case.config["type"] for case in CASES if isinstance(case.parsed, PolicyGradientLossConfig)}
)
CHOICES: dict[str, list[Any]] = {
    "kl": [
        {"coefficient": 0.3, "estimator": "k1", "ratio_level": "document_product"},
        {"coefficient": 0.3, "estimator": "k2", "gradient": "estimator"},
        {"coefficient": 0.3, "gradient": "straight_through"},
    ],
    "rollout_correction": [
        {"low": 0.9},
        {"level": "document", "mean": "geometric", "high": 1.01},
        {"level": "document", "mean": "product", "mode": "mask", "high": 1.3},
    ],
    "off_policy_mask": [{"threshold": 0.03, "behaviour": name} for name in ("old", "rollout")],
    "max_staleness": [2],
    "entropy": [{"bonus": 0.1}, {"bonus": 0.1, "top_fraction": 0.6}],
    "normalisation": ["tokens", "documents", "groups"],
}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_options_compose(loss: str) -> None:
    """Random choices of all options at once, without those that the config refuses."""
    batch = pack(policy_documents())
    statistics = random_statistics(batch)
    draws = random.Random(loss)
    number = 0
    while number < 8:
        options = {name: draws.choice([None, *values]) for name, values in CHOICES.items()}
        given = {name: value for name, value in options.items() if value is not None}
        case = LossCase(f"{loss} {given}", {"type": loss, **given})
        try:
            actual = case.loss()(statistics, batch)
        except ValidationError:
            continue
        number += 1
        expected = case.reference(reference_tokens(statistics, batch))
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10, msg=case.name)
        for got, wanted in zip(
            gradients(actual, statistics), gradients(expected, statistics), strict=True
        ):
            torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10, msg=case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradient_is_the_derivative(case: LossCase, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = case.batch()
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    # Saturated ratios of e^20 leave no digits for finite differences of the rest.
    ref = torch.where(batch.document_index == UNLIKELY, -29.5, batch.ref_logprobs)
    batch = batch.replace(old_logprobs=batch.old_logprobs.clamp(min=-6), ref_logprobs=ref)
    statistics = random_statistics(batch)
    loss = case.loss()

    def function(*vectors: Tensor) -> Tensor:
        names = ("logprobs", "entropy", "logsumexp", "mean_logit", "divergence")
        return loss(TokenStatistics(**dict(zip(names, vectors, strict=True))), batch)

    frozen = with_frozen_detach(function, monkeypatch)
    inputs = tuple(statistics.vectors())
    assert torch.autograd.gradcheck(frozen, inputs, eps=1e-6, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_documents_and_micro_batches_in_any_order(case: LossCase) -> None:
    documents = case.documents()
    batch = pack(documents)
    statistics = random_statistics(batch)
    expected = case.loss()(statistics, batch)
    expected_grads = gradients(expected, statistics)
    splits: dict[str, list[list[list[int]]]] = {
        "token": [[[3, 1, 0, 2], [9, 8, 7, 4, 5, 6]], [[0], list(range(1, 10))]],
        "group": [[[5, 1], [4, 3, 2, 0]]],
        "batch": [[[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]],
    }
    splits["document"] = splits["token"]
    for parts in splits[case.loss().scope]:
        packs = [TokenBatch.from_documents([documents[i] for i in part]) for part in parts]
        counts = BatchCounts.of(packs)
        total = torch.zeros((), dtype=torch.float64)
        for part, chosen in zip(packs, parts, strict=True):
            (kwargs,) = part.to_kwargs(counts=counts)
            index = slots_of(batch, chosen)
            split = statistics.map(itemgetter(index))
            total = total + case.loss()(split, widen(kwargs))
        torch.testing.assert_close(total, expected, atol=1e-12, rtol=1e-12)
        for actual, wanted in zip(gradients(total, statistics), expected_grads, strict=True):
            torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


def slots_of(batch: BatchKwargs, documents: list[int]) -> Tensor:
    """The slots of some documents, in their order."""
    return torch.cat([(batch.document_index == d).nonzero()[:, 0] for d in documents])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_outside_of_gradient_rows_have_no_say(case: LossCase) -> None:
    batch = case.batch()
    statistics = random_statistics(batch)
    loss = case.loss()
    rows = loss.gradient_rows(batch)
    assert rows is not None
    expected = loss(statistics, batch)
    grads = gradients(expected, statistics)
    outside = torch.ones_like(batch.labels, dtype=torch.bool)
    outside[rows.index] = False
    assert all(grad[outside].count_nonzero() == 0 for grad in grads)
    compact = statistics.map(lambda value: value[rows.index])
    alone = loss(compact, batch.select(rows.index))
    torch.testing.assert_close(alone, expected, atol=1e-12, rtol=1e-12)
    for actual, wanted in zip(gradients(alone, statistics), grads, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_metrics_do_not_depend_on_the_split(case: LossCase) -> None:
    batch = case.batch()
    statistics = random_statistics(batch).map(Tensor.detach)
    loss = case.loss()
    whole = finish_metrics(loss.metrics(statistics, batch))
    assert not any(value.requires_grad for value in whole.values())
    assert all(value.isfinite() for value in whole.values())
    torch.testing.assert_close(whole["loss"], loss(statistics, batch).double())
    if loss.scope in ("token", "document"):
        cut = slots_of(batch, [0, 1, 2, 3]), slots_of(batch, [4, 5, 6, 7, 8, 9])
        parts = [
            loss.metrics(statistics.map(itemgetter(index)), batch.select(index)) for index in cut
        ]
        split = finish_metrics(add_metrics(parts))
        assert split.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(split[name].double(), value.double(), msg=name)
