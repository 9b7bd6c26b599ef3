"""Advantage estimators against their definitions, one answer at a time."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from fastrl.config import ConfigError, parse_config
from fastrl.config.advantages import AdvantageConfig
from fastrl.data.advantages import group_advantages, with_group_advantages
from fastrl.data.documents import Document, DocumentError
from fastrl.data.group_estimators import less_best_of_k, less_best_without
from fastrl.data.token_advantages import (
    with_clamped_advantages,
    with_optimal_token_advantages,
    with_whitened_advantages,
)
from fastrl.training.advantages import with_advantages

NAN = float("nan")
EXACT: dict[str, Any] = {"rel": 1e-12, "abs": 1e-12}


def document(reward: float | None, labels: int = 2, group: int = 0, **fields: Any) -> Document:
    return Document([1] * (labels + 1), prompt_length=1, reward=reward, group_id=group, **fields)


def advantages(documents: list[Document]) -> list[Any]:
    return [each.advantage for each in documents]


def draw(seed: int) -> tuple[random.Random, list[float], list[int]]:
    """Rewards of three groups, in a mixed order."""
    rng = random.Random(seed)
    groups = [0] * 4 + [1] * 5 + [2] * 3
    rng.shuffle(groups)
    return rng, [rng.choice([0.0, 0.25, 1.0, rng.random()]) for _ in groups], groups


@pytest.mark.parametrize("seed", range(4))
def test_baselines_and_scales_are_their_definitions(seed: int) -> None:
    rng, rewards, groups = draw(seed)
    lengths = [rng.randint(1, 9) for _ in rewards]
    greedy = [[0.5, 0.1, 1.0][group] for group in groups]
    opo = group_advantages(
        rewards, groups, baseline="length_weighted", scale="none", lengths=lengths
    )
    remax = group_advantages(rewards, groups, baseline="greedy", scale="none", greedy=greedy)
    maxrl = group_advantages(rewards, groups, scale="mean", epsilon=0)
    plain = group_advantages(rewards, groups, baseline="none", scale="none")
    assert plain == rewards
    for i, reward in enumerate(rewards):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        total = sum(lengths[j] for j in members)
        weighted = sum(lengths[j] * rewards[j] for j in members) / total
        mean = sum(rewards[j] for j in members) / len(members)
        assert opo[i] == pytest.approx(reward - weighted, **EXACT)
        assert remax[i] == pytest.approx(reward - greedy[i], **EXACT)
        assert maxrl[i] == pytest.approx((reward - mean) / mean, **EXACT)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_the_best_of_k_is_over_all_sets(k: int) -> None:
    rng = random.Random(k)
    rewards = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(6)]
    sets = list(itertools.combinations(range(6), k))
    best = [max(rewards[i] for i in each) for each in sets]
    found, std = less_best_of_k(rewards, k)
    assert std == pytest.approx(statistics.pstdev(best), **EXACT)
    for i in range(6):
        with_i = [value for each, value in zip(sets, best, strict=True) if i in each]
        expected = statistics.fmean(with_i) - statistics.fmean(best)
        assert found[i] == pytest.approx(expected, **EXACT)
    if k == 1:
        return
    for i, value in enumerate(less_best_without(rewards, k)):
        gains = [
            max(rewards[j] for j in each) - max(rewards[j] for j in each if j != i)
            for each in sets
            if i in each
        ]
        assert value == pytest.approx(statistics.fmean(gains), **EXACT)


def test_pass_at_k_of_right_and_wrong_is_that_of_the_paper() -> None:
    """arXiv:2508.10751, section 2.4, of 7 answers with 2 right ones."""
    n, wrong, k = 7, 5, 3
    rewards = [1.0] * (n - wrong) + [0.0] * wrong
    found = group_advantages(rewards, [0] * n, pass_at=k, epsilon=0)
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    right = (1 - mean) / std
    others = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    assert found == pytest.approx([right] * (n - wrong) + [others] * wrong, **EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_token_baseline_is_its_definition(seed: int) -> None:
    rng, rewards, groups = draw(seed)
    documents: list[Document] = []
    columns: list[dict[str, Any]] = []
    for reward, group in zip(rewards, groups, strict=True):
        n = rng.randint(0, 5)
        probabilities = [rng.uniform(0.2, 0.9) for _ in range(n)]
        squares = [p * p + rng.random() * (1 - p) ** 2 for p in probabilities]
        logprobs = [math.log(p) for p in probabilities]
        columns.append({"logprobs": logprobs, "sum_squares": squares})
        documents.append(document(reward, n, group, **columns[-1]))
    found = with_optimal_token_advantages(documents)
    for i, each in enumerate(documents):
        n = each.num_labels
        for t in range(n):
            top = bottom = 0.0
            members = [
                j
                for j, other in enumerate(documents)
                if groups[j] == groups[i] and other.num_labels > t
            ]
            for j in members:
                weight = 0.0
                for s in range(t + 1):
                    p = math.exp(columns[j]["logprobs"][s])
                    weight += 1 - 2 * p + columns[j]["sum_squares"][s]
                top += weight * rewards[j]
                bottom += weight
            got = found[i].advantage[t + 1]  # type: ignore[index]
            assert got == pytest.approx(rewards[i] - top / bottom, **EXACT)
            if len({rewards[j] for j in members}) == 1:
                assert got == 0


def test_parts_of_a_rollout_share_one_count_of_tokens() -> None:
    fields: dict[str, Any] = {"logprobs": [-0.5, -0.7], "sum_squares": [0.4, 0.5]}
    parts = [document(1.0, rollout_id="a", **fields), document(None, rollout_id="a", **fields)]
    whole = {name: values * 2 for name, values in fields.items()}
    other = document(0.0, 4, logprobs=[-0.1] * 4, sum_squares=[0.9] * 4)
    first, second, _ = advantages(with_optimal_token_advantages([*parts, other]))
    (one, _) = advantages(with_optimal_token_advantages([document(1.0, 4, **whole), other]))
    assert first[1:] + second[1:] == one[1:]
    lengths = with_group_advantages([*parts, other], baseline="length_weighted", scale="none")
    assert advantages(lengths) == [0.5, 0.5, -0.5]


@pytest.mark.parametrize("over", ["tokens", "rollouts"])
def test_whitening_is_over_the_whole_step(over: Any) -> None:
    documents = [document(None, n, advantage=a) for n, a in ((1, 1.0), (3, 0.5), (2, -2.0))]
    counted = [1.0, 0.5, -2.0] if over == "rollouts" else [1.0] + [0.5] * 3 + [-2.0] * 2
    mean, std = statistics.fmean(counted), statistics.stdev(counted)
    found = with_whitened_advantages([*documents, document(None)], over, epsilon=0.01)
    expected = [(a - mean) / (std + 0.01) for a in (1.0, 0.5, -2.0)]
    assert advantages(found)[:3] == pytest.approx(expected, **EXACT)
    assert found[3].advantage is None
    equal = [document(None, n, advantage=0.1) for n in (1, 2, 4)]
    assert advantages(with_whitened_advantages(equal, over)) == [0.0] * 3
    assert advantages(with_whitened_advantages(equal[:1], over)) == [0.0]


def test_whitening_and_clamping_of_tokens() -> None:
    documents = [document(None, 2, advantage=[1.0, 3.0]), document(None, 1, advantage=[9.0, -1.0])]
    found = advantages(with_whitened_advantages(documents, "tokens", epsilon=0))
    assert found == [[0.0, 0.0, 1.0], [0.0, -1.0]]
    clamped = with_clamped_advantages([*documents, document(None, advantage=-7.0)], -2.0, 2.0)
    assert advantages(clamped) == [[1.0, 2.0], [2.0, -1.0], -2.0]


def test_gdpo_compares_each_reward_by_itself() -> None:
    rewards = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 0.0}, {"right": 0.0, "form": 5}]
    documents = [document(sum(each.values()), rewards=each) for each in rewards]
    documents.append(document(None))
    weights = {"right": 1.0, "form": 0.5}
    found = advantages(with_group_advantages(documents, reward_weights=weights))
    right = group_advantages([1.0, 0.0, 0.0], [0] * 3)
    form = group_advantages([0.0, 0.0, 5.0], [0] * 3)
    expected = [a + 0.5 * b for a, b in zip(right, form, strict=True)]  # type: ignore[operator]
    assert found[:3] == pytest.approx(expected, **EXACT)
    assert found[3] is None
    with pytest.raises(DocumentError, match=r"`rewards` must have `right`, got \[\]"):
        with_group_advantages([document(1.0)], reward_weights=weights)


@pytest.mark.parametrize("preset", AdvantageConfig.PRESETS)
def test_presets_are_as_documented(preset: str) -> None:
    text = Path(__file__).parents[2].joinpath("docs/data.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{preset}` |"))
    keys = row.split("|")[3]
    values = dict(re.findall(r"`(\w+): (\w+)`", keys))
    assert AdvantageConfig.PRESETS[preset] == values


ESTIMATORS = [*AdvantageConfig.PRESETS, "pass_at"]


def by_config(documents: list[Document], name: str) -> list[Document]:
    options: Any = {"pass_at": 2} if name == "pass_at" else {"preset": name}
    weights = {"a": 1.0} if name == "gdpo" else None
    config = parse_config(AdvantageConfig, options, source="test")
    return with_advantages(documents, config, reward_weights=weights)[0]


def scored(reward: float | None, group: int = 0) -> Document:
    """A document with all that any estimator reads."""
    rewards = None if reward is None else {"a": reward}
    return document(
        reward,
        group=group,
        rewards=rewards,
        greedy_reward=0.3,
        logprobs=[-0.5, -0.7],
        sum_squares=[0.4, 0.5],
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_missing_and_single_rewards(name: str) -> None:
    def flat(values: list[Any]) -> list[float]:
        return [x for each in values for x in (each if isinstance(each, list) else [each])]

    equal = flat(advantages(by_config([scored(0.1) for _ in range(3)], name)))
    single = flat(advantages(by_config([scored(0.1)], name)))
    if name == "remax":
        assert set(equal) == set(single) == {0.1 - 0.3}
    else:
        assert set(equal) == set(single) == {0.0}
    rewards = [1.0, 0.0, 0.5]
    whole = by_config([scored(reward) for reward in rewards], name)
    missing = by_config([scored(reward) for reward in (1.0, None, 0.0, NAN, 0.5)], name)
    assert advantages([missing[i] for i in (0, 2, 4)]) == advantages(whole)
    assert [each.has_labels for each in missing] == [True, False, True, False, True]
    assert any(flat(advantages(whole)))
    none = by_config([scored(None), scored(NAN)], name)
    assert advantages(none) == [None, None]
    with pytest.raises(DocumentError, match=r"document 1: `(reward|rewards)` must be (a )?finite"):
        by_config([scored(0.0), scored(math.inf)], name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "mean", "baseline": "none"}, "`scale: mean` must go with `baseline` of mean"),
        ({"baseline": "optimal_token"}, "must go with `scale` of none, got group"),
        ({"pass_at": 2, "scale": "batch"}, "`pass_at` must go with `scale` of none or group"),
        ({"pass_at": 2, "baseline": "greedy"}, "`pass_at` must go with `baseline` of mean or"),
        ({"preset": "gdpo", "reward_clamp": [0, 1]}, "must go with `reward_clamp` of null, got"),
        ({"preset": "gdpo", "pass_at": 2}, "must go with `pass_at` of 1, got 2"),
        ({"kl_in_reward": {"coefficient": 1, "level": "token"}}, "must go with `scale` of none"),
        (
            {"preset": "optimal_token", "kl_in_reward": {"coefficient": 1, "level": "token"}},
            "`kl_in_reward.level: token` must go with `baseline`",
        ),
        ({"whiten": "tokens", "zero_variance": "drop"}, "must go with `zero_variance` of keep"),
        ({"preset": "optimal_token", "whiten": "rollouts"}, "must go with `whiten` of none or tok"),
        ({"clamp": [1, 1]}, "`clamp` must be [low, high] with low below high, got [1.0, 1.0]"),
        ({"clamp": [1, 2]}, "`clamp` must have 0 within its bounds, got [1.0, 2.0]"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(AdvantageConfig, options, source="test")
    assert message in str(caught.value)


def test_arguments_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="`lengths` must be given with `baseline` length_weighted"):
        group_advantages([1.0], [0], baseline="length_weighted")
    with pytest.raises(ValueError, match="`greedy` must be given with `baseline` greedy and only"):
        group_advantages([1.0], [0], greedy=[1.0])
    with pytest.raises(ValueError, match="`pass_at` must be at least 1, and above 1 only with"):
        group_advantages([1.0], [0], pass_at=2, scale="batch")
    with pytest.raises(ValueError, match="`scale` mean must go with `baseline` mean"):
        group_advantages([1.0], [0], scale="mean", baseline="none")
    with pytest.raises(DocumentError, match="document 0: `reward` must be at least 0 to be divide"):
        group_advantages([-1.0], [0], scale="mean")
    with pytest.raises(DocumentError, match="document 0: `greedy_reward` must be finite, got inf"):
        group_advantages([1.0], [0], baseline="greedy", greedy=[math.inf])
    with pytest.raises(DocumentError, match="document 0: `sum_squares` is required for an optimal"):
        with_optimal_token_advantages([document(1.0, logprobs=[-1.0, -1.0])])
