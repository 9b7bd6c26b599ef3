"""The entropy controller and the top-entropy mask."""

from __future__ import annotations

import pytest
import torch

from fastrl.config import EntropyConfig
from fastrl.functional.quantiles import mean_at_most, ordered_keys, top_fraction, upper_threshold
from fastrl.layers.losses.entropy import EntropyBonus
from tests.helpers.loss_documents import pack, policy_documents
from tests.helpers.loss_heads import capped_head, random_hidden


def test_the_bonus_follows_the_target_within_its_bounds() -> None:
    adaptive = {"target": 1.0, "step": 0.25, "low": 0.1, "high": 0.4}
    bonus = EntropyBonus(EntropyConfig.model_validate({"bonus": 0.1, "adaptive": adaptive}))
    assert bonus.value == 0.1
    bonus.end_step(0.9)
    assert bonus.value == pytest.approx(0.35)
    bonus.end_step(1.0)
    assert bonus.value == 0.4
    bonus.end_step(1.1)
    assert bonus.factor == pytest.approx(0.15)
    assert bonus.value == 0  # above the target it does not act
    restored = EntropyBonus(EntropyConfig.model_validate({"bonus": 0.4, "adaptive": adaptive}))
    restored.load_state_dict(bonus.state_dict())
    bonus.end_step(0.5)
    restored.end_step(0.5)
    assert restored.value == bonus.value == pytest.approx(0.4)


def test_the_head_moves_the_bonus_of_its_losses() -> None:
    adaptive = {"target": 10.0, "step": 0.5}
    head = capped_head({"policy": {"type": "grpo", "entropy": {"adaptive": adaptive}}})
    batch = pack(policy_documents())
    hidden = random_hidden(batch)
    before = head(hidden, batch)
    assert before.metrics["policy/entropy_bonus_max"].item() == 0
    head.end_step(before.metrics)
    after = head(hidden, batch)
    entropy = before.metrics["policy/entropy"]
    torch.testing.assert_close(after.loss, before.loss - 0.5 * entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_have_the_order_of_the_values(dtype: torch.dtype) -> None:
    values = torch.tensor(
        [-torch.inf, -1e30, -1.0, -1e-40, -0.0, 0.0, 1e-40, 0.5, 1.0, 3e38, torch.inf], dtype=dtype
    )
    keys = ordered_keys(values)
    assert keys[4] == keys[5]
    distinct = torch.cat([keys[:5], keys[6:]])
    assert (distinct[1:] > distinct[:-1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 10, 31, 200])
@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.7, 0.99])
def test_the_mask_is_that_of_the_quantile(fraction: float, count: int, dtype: torch.dtype) -> None:
    values = torch.randn(count + 5, dtype=dtype)
    values[::3] = values[0]  # ties
    mask = torch.ones(count + 5, dtype=torch.bool)
    mask[torch.randperm(count + 5)[:5]] = False
    quantile = torch.quantile(values[mask].double(), 1 - fraction)
    expected = mask & (values.double() >= quantile - 1e-12)
    assert torch.equal(top_fraction(values, mask, fraction), expected)


def test_no_value_takes_part() -> None:
    mask = torch.zeros(4, dtype=torch.bool)
    assert not top_fraction(torch.randn(4), mask, 0.5).any()
    assert not mean_at_most(torch.rand(4), mask, 0.5).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 10, 200])
@pytest.mark.parametrize("bound", [1e-3, 0.3, 1.0, 5.0])
def test_the_fewest_are_dropped_for_a_mean(bound: float, count: int, dtype: torch.dtype) -> None:
    values = torch.randn(count + 5, dtype=dtype).square()
    mask = torch.ones(count + 5, dtype=torch.bool)
    mask[torch.randperm(count + 5)[:5]] = False
    kept = sorted(values[mask].tolist())
    while kept and sum(kept) / len(kept) > bound:
        kept.pop()
    expected = mask & (values <= (kept[-1] if kept else -1.0))
    assert torch.equal(mean_at_most(values, mask, bound), expected)


def test_equal_values_are_dropped_together_and_a_mean_at_the_bound_is_kept() -> None:
    values = torch.tensor([1.0, 3.0, 3.0, 0.1, 0.1, 0.1])
    mask = torch.tensor([True, True, True, False, False, False])
    assert mean_at_most(values, mask, 2.0).tolist() == [True, *[False] * 5]
    values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    assert mean_at_most(values, torch.ones(3, dtype=torch.bool), 0.2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_on_mass(dtype: torch.dtype) -> None:
    values = torch.randn(5, 40, dtype=dtype)
    weights = torch.softmax(values, 1)
    threshold = upper_threshold(values, weights, lambda total: total * 0.8)
    kept = ordered_keys(values) >= threshold[:, None]
    for row in range(5):
        ordered, index = values[row].sort(descending=True)
        mass = weights[row][index].cumsum(0)
        number = int((mass < 0.8 * weights[row].sum()).sum()) + 1
        assert torch.equal(kept[row], values[row] >= ordered[number - 1])
