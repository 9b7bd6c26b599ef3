"""What the metrics say, computed by hand; how parts are put together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastrl.layers.losses import add_metrics, finish_metrics, reduce_metrics
from tests.helpers.loss_cases import BY_NAME, LossCase
from tests.helpers.loss_documents import CURRENT_VERSION, pack, policy_documents, random_statistics
from tests.helpers.loss_heads import capped_head, random_hidden


def k3(log_ratio: Tensor) -> Tensor:
    """Of KL(p, q) from p's samples, log q / p."""
    bounded = log_ratio.clamp(-20, 20)
    return bounded.exp() - 1 - bounded


def test_metrics_are_moments_over_the_labels() -> None:
    batch = pack(policy_documents())
    statistics = random_statistics(batch)
    metrics = finish_metrics(BY_NAME["grpo"].loss().metrics(statistics, batch))
    mask = batch.labels != -100
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    assert batch.rollout_logprobs is not None
    assert batch.advantages is not None
    assert batch.model_version is not None
    assert statistics.entropy is not None
    new, old = statistics.logprobs[mask].detach(), batch.old_logprobs[mask]
    ref, rollout = batch.ref_logprobs[mask], batch.rollout_logprobs[mask]
    advantages = batch.advantages[mask]
    ratio = (new - old).clamp(-20, 20).exp()
    weights = (old - rollout).exp()
    low = (ratio < 0.85) & (advantages < 0)
    high = (ratio > 1.25) & (advantages > 0)
    expected = {
        "logprob": new.mean(),
        "old_logprob": old.mean(),
        "entropy": statistics.entropy[mask].mean(),
        "ratio": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ratio_variance": ratio.var(correction=0),
        "ratio_ess": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "advantage": advantages.mean(),
        "advantage_min": advantages.min(),
        "advantage_max": advantages.max(),
        "advantage_variance": advantages.var(correction=0),
        "clip_fraction_low": low.double().mean(),
        "clip_fraction_high": high.double().mean(),
        "clip_fraction": (low | high).double().mean(),
        "active_fraction": (advantages != 0).double().mean(),
        "kl_old_new": k3(new - old).mean(),
        "kl_old_new_k1": (old - new).mean(),
        "kl_ref": k3(ref - new).mean(),
        "kl_ref_k1": (new - ref).mean(),
        "kl_rollout": k3(old - rollout).mean(),
        "kl_rollout_k1": (rollout - old).mean(),
        "rollout_weight": weights.mean(),
        "rollout_weight_ess": weights.sum() ** 2 / (weights**2).sum() / len(weights),
        "staleness": (CURRENT_VERSION - batch.model_version[mask]).double().mean(),
        "staleness_max": (CURRENT_VERSION - batch.model_version[mask]).max(),
        "tokens": mask.sum(),
        "documents": torch.tensor(8.0),
    }
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value.double(), msg=name)


def test_rewards_count_the_scored_documents_once() -> None:
    documents = policy_documents()
    batch = pack(documents)
    assert batch.rewards is not None
    rewards = batch.rewards.clone()
    rewards[0] = math.nan
    loss = BY_NAME["grpo"].loss()
    metrics = finish_metrics(loss.metrics(random_statistics(batch), batch.replace(rewards=rewards)))
    labelled = [
        d for d in range(len(documents)) if (batch.labels[batch.document_index == d] >= 0).any()
    ]
    scored = rewards[labelled][1:].double()
    torch.testing.assert_close(metrics["reward"], scored.mean())
    torch.testing.assert_close(metrics["reward_variance"], scored.var(correction=0))
    assert metrics["reward_share"].item() == pytest.approx((len(labelled) - 1) / len(labelled))


def test_weights_of_all_masks() -> None:
    batch = pack(policy_documents())
    statistics = random_statistics(batch)
    case = LossCase("stale", {"type": "grpo", "max_staleness": 2})
    metrics = case.loss().metrics(statistics, batch)
    mask = batch.labels != -100
    assert batch.model_version is not None
    fresh = CURRENT_VERSION - batch.model_version[mask] <= 2
    torch.testing.assert_close(metrics["weight"], fresh.double().mean())
    # A token without advantage teaches nothing, but no mask has dropped it.
    mask_config = {"threshold": 1e-9, "behaviour": "rollout"}
    case = LossCase("off_policy", {"type": "grpo", "off_policy_mask": mask_config})
    batch = batch.replace(rollout_logprobs=torch.zeros_like(statistics.logprobs))
    assert batch.advantages is not None
    kept = batch.advantages[mask] >= 0
    metrics = case.loss().metrics(statistics, batch)
    torch.testing.assert_close(metrics["weight"], kept.double().mean())


def test_each_correction_has_its_mean_and_what_it_drops() -> None:
    batch = pack(policy_documents())
    statistics = random_statistics(batch)
    entries = [{"mode": "truncate", "high": 1.05}, {"low": 0.95, "high": 1.05}]
    case = LossCase("both", {"type": "grpo", "corrections": entries})
    metrics = case.loss().metrics(statistics, batch)
    mask = batch.labels != -100
    assert batch.old_logprobs is not None
    assert batch.rollout_logprobs is not None
    ratio = (batch.old_logprobs - batch.rollout_logprobs)[mask].exp()
    outside = ((ratio < 0.95) | (ratio > 1.05)).double().mean()
    assert 0 < outside < 1
    torch.testing.assert_close(metrics["correction_0"], ratio.clamp(max=1.05).mean())
    assert metrics["correction_0_masked"] == 0
    torch.testing.assert_close(metrics["correction_1"], 1 - outside)
    torch.testing.assert_close(metrics["correction_1_masked"], outside)
    assert "correction_0" not in LossCase("old", {"type": "grpo"}).loss().metrics(statistics, batch)


def test_parts_are_put_together_by_name() -> None:
    parts = [
        {"a/x": torch.tensor(1.0), "a/x_min": torch.tensor(3.0), "a/x_max": torch.tensor(3.0)},
        {"a/x": torch.tensor(2.0), "a/x_min": torch.tensor(-1.0), "a/x_max": torch.tensor(4.0)},
    ]
    whole = reduce_metrics(add_metrics(parts), (None,))
    assert {name: value.item() for name, value in whole.items()} == {
        "a/x": 3.0,
        "a/x_min": -1.0,
        "a/x_max": 4.0,
    }


def test_without_metrics_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    head = capped_head({"policy": {"type": "grpo"}}, metrics=False)

    def never(*_: object) -> None:
        raise AssertionError("metrics were computed")

    for name in ("metrics", "with_metrics"):
        monkeypatch.setattr(type(head.losses["policy"]), name, never)
    batch = pack(policy_documents())
    assert head(random_hidden(batch), batch).metrics == {}
