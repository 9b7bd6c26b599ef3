"""Labels that are drawn at random: unbiased, and the same whatever the packing and the ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import Document, LanguageModelHead, OptimizerStep, TokenBatch
from fastrl.data.token_sampling import token_draws, with_sampled_tokens
from fastrl.functional.reference import losses as reference_losses
from tests.helpers.loss_cases import LossCase
from tests.helpers.loss_documents import (
    CURRENT_VERSION,
    pack,
    policy_documents,
    random_statistics,
    reference_tokens,
    widen,
)
from tests.helpers.loss_heads import capped_head, close_to_policy, random_hidden

LOSSES: dict[str, dict[str, Any]] = {
    "policy": {
        "type": "grpo",
        "normalisation": "documents",
        "kl": {"coefficient": 0.2},
        "rollout_correction": {"high": 1.05},
        "entropy": {"bonus": 0.1},
    },
    "positive": {"type": "positive_nll"},
    "smoothed": {"type": "cross_entropy", "label_smoothing": 0.1, "weight": 0.3},
}


def gradients(head: LanguageModelHead, hidden: Tensor, batch: Any) -> list[Tensor]:
    loss = head(hidden, batch).loss
    assert loss is not None
    return [loss.detach(), *torch.autograd.grad(-1.7 * loss, [hidden, head.weight])]


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_the_mean_over_all_draws_is_the_loss_of_all_labels(strategy: str) -> None:
    names = ["policy", "positive"] + ["smoothed"] * (strategy == "recompute")
    head = capped_head({name: LOSSES[name] for name in names}, strategy=strategy)
    documents = [policy_documents()[i] for i in (1, 7, 8)]
    packed = TokenBatch.from_documents(documents)
    whole = widen(packed.to_kwargs()[0])
    hidden = random_hidden(whole).requires_grad_()
    whole = close_to_policy(head, hidden, whole)
    expected = gradients(head, hidden, whole)
    labelled = (packed.labels != -100).nonzero()[:, 0]
    assert len(labelled) == 5
    means = [torch.zeros_like(each) for each in expected]
    p = 0.25
    for draws in product([False, True], repeat=len(labelled)):
        weights = torch.zeros(packed.padded_length, dtype=torch.float64)
        weights[labelled[torch.tensor(draws)]] = 1 / p
        (drawn,) = replace(packed, draw_weights=weights).to_kwargs()
        drawn = drawn.replace(
            current_version=CURRENT_VERSION,
            **{
                name: torch.where(drawn.labels != -100, getattr(whole, name), 0)
                for name in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
            },
        )
        share = p ** sum(draws) * (1 - p) ** (len(draws) - sum(draws))
        for mean, value in zip(means, gradients(head, hidden, drawn), strict=True):
            mean += share * value
    for mean, value in zip(means, expected, strict=True):
        torch.testing.assert_close(mean, value, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_a_draw_is_the_definition_with_weights(name: str) -> None:
    case = LossCase(name, LOSSES[name])
    whole = pack(policy_documents())
    packed = TokenBatch.from_documents(policy_documents(), pad_to_multiple=8)
    sampled = with_sampled_tokens(packed, 0.6, seed=3)
    batch = widen(sampled.to_kwargs()[0])
    statistics = random_statistics(whole)
    actual = case.loss()(statistics, batch)
    tokens = replace(reference_tokens(statistics, whole), draw_weights=sampled.draw_weights)
    expected = reference_losses.LOSSES[case.config["type"]](tokens, case.options)
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-7)  # weights are fp32
    assert 0 < len(batch.rows_with_labels) < len(whole.rows_with_labels)


def drawn_by_document(batch: TokenBatch, documents: list[Document]) -> dict[int, list[int]]:
    """Places of the drawn labels of each document."""
    found = {}
    for document, slots in zip(documents, batch.document_slots, strict=True):
        assert batch.draw_weights is not None
        found[id(document)] = batch.draw_weights[slots].nonzero()[:, 0].tolist()
    return found


def test_packing_order_and_shards_draw_the_same() -> None:
    documents = policy_documents()
    whole = with_sampled_tokens(TokenBatch.from_documents(documents), 0.5, seed=9)
    expected = drawn_by_document(whole, documents)
    assert 0 < sum(map(len, expected.values())) < whole.num_labels
    assert whole.draw_weights is not None
    assert whole.draw_weights.unique().tolist() == [0.0, 1 / 0.5]
    again: dict[int, list[int]] = {}
    for part in ([9, 3, 1, 7], [0, 2, 4, 8, 6, 5]):
        chosen = [documents[i] for i in part]
        packed = TokenBatch.from_documents(chosen, pad_to_multiple=4)
        again |= drawn_by_document(with_sampled_tokens(packed, 0.5, seed=9), chosen)
    assert again == expected
    other = with_sampled_tokens(TokenBatch.from_documents(documents), 0.5, seed=10)
    assert drawn_by_document(other, documents) != expected
    padded = whole.padded(64)
    counts = OptimizerStep([padded]).counts
    assert counts == OptimizerStep([TokenBatch.from_documents(documents)]).counts
    head = capped_head({name: LOSSES[name] for name in ("policy", "positive")})
    (one,) = padded.to_kwargs()
    hidden = random_hidden(one)
    loss = head(hidden, widen(one)).loss
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(4):
        (piece,) = padded.shard(counts, rank=rank, size=4, layout="contiguous")
        assert piece.num_labels_in_batch == one.num_labels_in_batch == whole.num_labels
        total = total + head(hidden[16 * rank : 16 * rank + 16], widen(piece)).loss
    torch.testing.assert_close(total, loss, atol=1e-12, rtol=1e-12)


def test_documents_that_share_slots_draw_the_same() -> None:
    documents = [
        Document([3, 1, 4, *end], prompt_length=3, advantage=1.0, group_id=0)
        for end in ([2, 5, 7, 7], [9, 1], [6, 2, 6, 1, 3])
    ]
    flat, shared = (
        with_sampled_tokens(TokenBatch.from_documents(documents, share_prefixes=x), 0.5, seed=1)
        for x in (False, True)
    )
    assert shared.paths is not None
    assert drawn_by_document(flat, documents) == drawn_by_document(shared, documents)


def test_each_label_is_drawn_as_often_as_said() -> None:
    tokens = torch.arange(5)
    draws = torch.stack([token_draws(tokens, 0.3, seed) for seed in range(4000)]).double()
    assert (draws.mean(0) - 0.3).abs().max() < 4 * (0.3 * 0.7 / 4000) ** 0.5
    # Neither neighbours nor other documents say anything of a draw.
    others = torch.stack([token_draws(tokens + 1, 0.3, seed) for seed in range(4000)]).double()
    together = torch.corrcoef(torch.cat([draws, others], 1).T) - torch.eye(10)
    assert together.abs().max() < 4.5 / 4000**0.5
    # A run goes on as it began, also under another numpy.
    assert token_draws(torch.arange(12), 0.3, 5).nonzero()[:, 0].tolist() == [1, 6, 7, 9, 10, 11]


def test_rows_that_are_not_drawn_do_not_enter_the_head() -> None:
    sampled = with_sampled_tokens(TokenBatch.from_documents(policy_documents()), 0.4, seed=2)
    (batch,) = sampled.to_kwargs()
    assert sampled.draw_weights is not None
    drawn = sampled.draw_weights.nonzero()[:, 0]
    assert torch.equal(batch.rows_with_labels.index, drawn)
    assert batch.active_rows is not None
    assert set(batch.active_rows.index.tolist()) <= set(drawn.tolist())
    (whole,) = TokenBatch.from_documents(policy_documents()).to_kwargs()
    assert torch.equal(batch.label_counts, whole.label_counts)
    with_labels = (batch.labels != -100).nonzero()[:, 0]
    assert torch.equal(with_labels, drawn)


def test_what_is_refused() -> None:
    packed = TokenBatch.from_documents(policy_documents())
    sampled = with_sampled_tokens(packed, 0.4, seed=2)
    with pytest.raises(ValueError, match="`probability` must be above 0 and at most 1, got 0"):
        with_sampled_tokens(packed, 0, seed=2)
    with pytest.raises(ValueError, match="`batch` must not have `draw_weights`"):
        with_sampled_tokens(sampled, 0.4, seed=2)
    (batch,) = sampled.to_kwargs()
    hidden = random_hidden(batch)
    for options, scope in (
        ({"type": "gspo"}, "document"),
        ({"type": "kl_cov"}, "batch"),
        ({"type": "grpo", "off_policy_mask": {"threshold": 0.1}}, "document"),
    ):
        with pytest.raises(ValueError, match=f"`draw_weights` must not .* tokens of a {scope}"):
            capped_head({"policy": options})(hidden, widen(batch))
