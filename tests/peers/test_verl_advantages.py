"""Advantages and KL controllers of fastrl against verl's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastrl.config.advantages import KLInRewardConfig
from fastrl.config.loss_options import AdaptiveKLConfig
from fastrl.data.advantages import group_advantages, with_group_advantages
from fastrl.data.documents import Document
from fastrl.data.reward_kl import with_kl_to_go
from fastrl.data.token_advantages import with_optimal_token_advantages, with_whitened_advantages
from fastrl.functional.kl import kl_estimate
from fastrl.layers.losses.kl import KLCoefficient
from tests.helpers.peer_packages import peer_module

core_algos = peer_module("verl.trainer.ppo.core_algos")

LENGTHS = [5, 2, 4, 1, 3, 6, 2, 5]
GROUPS = [0, 1, 0, 1, 0, 1, 0, 1]
WIDTH = max(LENGTHS)
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
EXACT: dict[str, Any] = {"atol": 1e-12, "rtol": 1e-12}
# verl divides by sqrt(var + 1e-8), and by the count of tokens + 1e-8.
WHITENED: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-6}


def draw() -> torch.Tensor:
    return torch.rand(len(LENGTHS), dtype=torch.float64)


def at_the_end(rewards: torch.Tensor) -> torch.Tensor:
    """verl's rewards of tokens: that of the answer at its last one."""
    placed = torch.zeros(MASK.shape, dtype=torch.float64)
    placed[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = rewards
    return placed


def documents(rewards: torch.Tensor, **columns: torch.Tensor) -> list[Document]:
    made = []
    for i, reward in enumerate(rewards.tolist()):
        given: Any = {name: values[i, : LENGTHS[i]].numpy() for name, values in columns.items()}
        tokens = [1] * (LENGTHS[i] + 1)
        made.append(Document(tokens, 1, reward=reward, group_id=GROUPS[i], **given))
    return made


def padded(found: list[Document]) -> torch.Tensor:
    rows = torch.zeros(MASK.shape, dtype=torch.float64)
    for i, document in enumerate(found):
        values = torch.as_tensor(document.advantage, dtype=torch.float64)
        rows[i, : LENGTHS[i]] = values[1:] if values.ndim else values
    return rows


def test_group_estimators_are_verls() -> None:
    rewards = draw()
    index = np.array(GROUPS)
    given: dict[str, Any] = {"token_level_rewards": at_the_end(rewards), "response_mask": MASK}
    greedy = torch.tensor([[0.2, 0.7][group] for group in GROUPS], dtype=torch.float64)
    lengths = {"baseline": "length_weighted", "lengths": LENGTHS, "scale": "none"}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("grpo_outcome", {"index": index}, {"epsilon": 1e-6}),
        ("grpo_vectorized_outcome", {"index": index}, {"epsilon": 1e-6}),
        (
            "grpo_outcome",
            {"index": index, "norm_adv_by_std_in_grpo": False},
            {"scale": "none"},
        ),
        ("rloo_outcome", {"index": index}, {"baseline": "leave_one_out", "scale": "none"}),
        (
            "rloo_vectorized_outcome",
            {"index": index},
            {"baseline": "leave_one_out", "scale": "none"},
        ),
        ("opo_outcome", {"index": index}, lengths),
        (
            "remax_outcome",
            {"reward_baselines": greedy},
            {"baseline": "greedy", "greedy": greedy.tolist(), "scale": "none"},
        ),
        (
            "grpo_passk_outcome",
            {"index": index, "config": {"norm_adv_by_std_in_grpo": False}},
            {"pass_at": 4, "baseline": "leave_one_out", "scale": "none"},
        ),
        ("gpg_outcome", {"index": index}, {"scale": "none"}),  # no reward is 0: alpha is 1
    ]
    for name, theirs, ours in cases:
        expected, _ = getattr(core_algos, f"compute_{name}_advantage")(**given, **theirs)
        values = group_advantages(rewards.tolist(), GROUPS, **ours)
        found = torch.tensor(values, dtype=torch.float64)[:, None] * MASK
        # `grpo_vectorized` computes in fp32.
        limits = WHITENED if "grpo_vectorized" in name else EXACT
        torch.testing.assert_close(found, expected.double(), **limits, msg=name)


def test_whitened_estimators_are_verls() -> None:
    rewards = draw()
    given: dict[str, Any] = {"token_level_rewards": at_the_end(rewards), "response_mask": MASK}
    expected, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        **given, index=np.array(GROUPS)
    )
    relative = with_group_advantages(documents(rewards), scale="none")
    found = padded(with_whitened_advantages(relative, "tokens", epsilon=0))
    torch.testing.assert_close(found, expected, **WHITENED)

    parts = {"right": draw(), "form": draw()}
    weights = {"right": 1.0, "form": 0.5}
    config = {"gdpo_reward_keys": list(parts), "gdpo_reward_weights": list(weights.values())}
    batch = {"prompts": torch.zeros(8, 1), "attention_mask": torch.cat([MASK[:, :1], MASK], 1)}
    expected, _ = core_algos.compute_gdpo_outcome_advantage(
        **given, index=np.array(GROUPS), config=config, non_tensor_batch=parts, batch=batch
    )
    several = [
        Document(
            document.tokens,
            prompt_length=1,
            reward=0.0,
            group_id=document.group_id,
            rewards={name: values[i].item() for name, values in parts.items()},
        )
        for i, document in enumerate(documents(rewards))
    ]
    relative = with_group_advantages(several, reward_weights=weights)
    found = padded(with_whitened_advantages(relative, "tokens", epsilon=0))
    # verl keeps these rewards in fp32, and adds 1e-6 to the std where we add 1e-4.
    torch.testing.assert_close(found, expected.double(), atol=2e-3, rtol=2e-3)


def test_reinforce_plus_plus_with_the_kl_of_tokens_is_verls() -> None:
    rewards = draw()
    old, reference = -torch.rand(2, *MASK.shape, dtype=torch.float64)
    kl = core_algos.kl_penalty(old, reference, "kl") * MASK
    expected, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards=at_the_end(rewards) - 0.3 * kl,
        response_mask=MASK.double(),
        config=type("Config", (), {"gamma": 1.0}),
    )
    given = documents(rewards, logprobs=old, ref_logprobs=reference)
    relative = with_group_advantages(given, baseline="none", scale="none")
    found = with_whitened_advantages(with_kl_to_go(relative, 0.3), "tokens", epsilon=0)
    torch.testing.assert_close(padded(found), expected, **WHITENED)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "multi_turn_optimal_token_baseline"])
def test_the_optimal_token_baseline_is_verls(name: str) -> None:
    rewards = draw()
    probabilities = torch.rand(MASK.shape, dtype=torch.float64) * 0.8 + 0.1
    squares = probabilities.square() + 0.1 * (1 - probabilities).square()
    expected, _ = getattr(core_algos, f"compute_{name}_advantage")(
        at_the_end(rewards),
        MASK.double(),
        np.array(GROUPS),
        probabilities.log(),
        squares,
        handle_zero_tail=False,  # True takes no baseline where one answer is left
        epsilon=0.0,
    )
    given = documents(rewards, logprobs=probabilities.log(), sum_squares=squares)
    found = padded(with_optimal_token_advantages(given))
    torch.testing.assert_close(found, expected.nan_to_num(0), **EXACT)


def test_controller_and_estimators_are_verls() -> None:
    theirs = core_algos.AdaptiveKLController(0.2, 0.1, 50)
    ours = KLCoefficient(
        KLInRewardConfig(coefficient=0.2, adaptive=AdaptiveKLConfig(target=0.1, horizon=50))
    )
    for kl in (0.5, 0.11, 0.1, 0.09, -1.0):
        theirs.update(kl, 16)
        ours.end_step(kl, 16)
        assert ours.value == pytest.approx(theirs.value, rel=1e-14)
    old, reference = 8 * torch.randn(2, 50, dtype=torch.float64)
    for name, bound in (("k1", None), ("k2", None), ("k3", 10.0)):
        expected = core_algos.kl_penalty(old, reference, name)
        torch.testing.assert_close(kl_estimate(old - reference, name, bound), expected, **EXACT)
