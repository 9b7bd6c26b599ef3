"""A step's metrics over several updates are those of one update with all tokens."""

from __future__ import annotations

import math

import pytest
import torch

from fastrl import Document, OptimizerStep
from fastrl.training.step_metrics import UpdateMetrics, combine_updates
from tests.helpers.batches import VOCAB_SIZE, padded_head

LOSSES = {"policy": {"type": "grpo", "normalisation": "tokens"}}


def _document(tokens: int, ratio: float, reward: float | None, group: int) -> Document:
    return Document(
        list(range(tokens + 1)),
        prompt_length=1,
        advantage=1.0 if ratio > 1 else -1.0,
        logprobs=[-math.log(VOCAB_SIZE) - math.log(ratio)] * tokens,
        reward=reward,
        group_id=group,
    )


def _update(documents: list[Document]) -> UpdateMetrics:
    """Of zero logits, so that every ratio is as its document was made."""
    head = padded_head(losses=LOSSES)
    torch.nn.init.zeros_(head.weight)
    step = OptimizerStep.from_documents(documents, 1000)
    for batch in step:
        step.add(head(torch.zeros(batch.num_tokens, head.config.hidden_size).double(), batch))
    values = {name: float(value) for name, value in step.finish(head.loss_groups).items()}
    counts = step.counts
    return UpdateMetrics(
        values, int(counts.num_labels_in_batch), int(counts.num_documents_in_batch)
    )


def test_c21_two_updates_have_the_metrics_of_one() -> None:
    first = [_document(1, 4, 1.0, 0), _document(1, 4, None, 0)]
    second = [_document(9, 0.5, 0.0, 1), _document(9, 0.5, 0.5, 1)]
    combined = combine_updates([_update(first), _update(second)])
    expected = {
        "ratio_min": 0.5,
        "ratio_max": 4,
        "ratio": 0.85,
        "ratio_variance": 1.1025,
        "tokens": 20,
        "documents": 4,
        "kl_old_new_k1": (18 * math.log(2) - 2 * math.log(4)) / 20,
        "reward": 0.5,
        "reward_share": 0.75,
        "reward_variance": 0.5 / 3,
    }
    for name, value in expected.items():
        assert combined[f"policy/{name}"] == pytest.approx(value, rel=1e-6), name
    whole = dict(_update(first + second).values)
    for name in ("loss", "policy/loss"):  # of an update
        del combined[name], whole[name]
    assert combined == pytest.approx(whole, rel=1e-6, abs=1e-9)


def test_an_update_without_labels_has_no_part_in_extremes() -> None:
    values = {"x": 3.0, "x_min": 2.0, "x_max": 4.0, "x_variance": 0.5}
    empty = dict.fromkeys(values, 0.0)
    combined = combine_updates([UpdateMetrics(values, 7, 2), UpdateMetrics(empty, 0, 0)])
    assert combined == pytest.approx(values)
    nothing = combine_updates([UpdateMetrics(empty, 0, 0)] * 2)
    assert nothing == empty


def test_what_is_of_an_update_is_its_mean() -> None:
    updates = [
        UpdateMetrics({"grad_norm": 1.0, "p/loss": 2.0}, 1, 1),
        UpdateMetrics({"grad_norm": 3.0, "p/loss": 6.0}, 9, 1),
    ]
    assert combine_updates(updates) == {"grad_norm": 2.0, "p/loss": 4.0}
