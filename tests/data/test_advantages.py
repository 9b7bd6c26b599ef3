"""Group-relative advantages, unscored completions and groups without a signal."""

from __future__ import annotations

import math
import random
import re
import statistics
from typing import Any

import pytest

from fastrl.data.advantages import (
    combined_rewards,
    group_advantages,
    with_group_advantages,
    without_zero_groups,
)
from fastrl.data.batch import BatchCounts, TokenBatch
from fastrl.data.documents import Document, DocumentError

_NAN = float("nan")


def _document(reward: float | None, group_id: int | str | None = 0, **fields: Any) -> Document:
    defaults: dict[str, Any] = {"tokens": [1, 2, 3], "prompt_length": 1, "logprobs": [-1.0, -1.0]}
    return Document(**(defaults | fields), reward=reward, group_id=group_id)


@pytest.mark.parametrize("missing", [None, _NAN])
def test_a1_an_unscored_completion_has_no_part(missing: float | None) -> None:
    documents = [_document(reward) for reward in (1.0, missing, 0.0, 0.0)]
    result = with_group_advantages(documents, scale="none")
    advantages = [document.advantage for document in result]
    assert advantages == [pytest.approx(2 / 3), None, pytest.approx(-1 / 3), pytest.approx(-1 / 3)]
    batch = TokenBatch.from_documents(result)
    assert batch.labels.tolist() == [2, 3, -100, -100, -100, -100, 2, 3, -100, 2, 3, -100]
    assert BatchCounts.of([batch]) == BatchCounts(6, 3)
    assert batch.columns["advantages"][3:6].tolist() == [0.0, 0.0, 0.0]
    assert not batch.columns["advantages"].isnan().any()


def test_a1_a_group_without_any_score_contributes_nothing() -> None:
    documents = [_document(reward, group) for group, reward in ((0, 1.0), (1, None), (1, _NAN))]
    batch = TokenBatch.from_documents(with_group_advantages(documents))
    assert batch.document_label_counts.tolist() == [2, 0, 0]
    only = TokenBatch.from_documents(with_group_advantages(documents[1:]))
    assert BatchCounts.of([only]) == BatchCounts(0, 0)


def test_a1_a_missing_reward_column_is_not_zero() -> None:
    columns = {"right": [1.0, _NAN, 0.0, None], "form": [1.0, 1.0, _NAN, None]}
    assert combined_rewards(columns) == [2.0, None, None, None]
    one = {"right": [1.0, _NAN, 0.0], "form": [0.5, 1.0, 1.0]}
    rewards = combined_rewards(one, {"right": 1.0, "form": 0.5})
    assert rewards == [1.25, None, 0.5]
    assert group_advantages(rewards, [0, 0, 0], scale="none") == [0.375, None, -0.375]
    with pytest.raises(ValueError, match="`weights` must name the columns"):
        combined_rewards(one, {"right": 1.0})
    with pytest.raises(ValueError, match="`columns` must be equally long"):
        combined_rewards({"a": [1.0], "b": []})


@pytest.mark.parametrize("seed", range(10))
def test_advantages_equal_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    rewards = [rng.choice([0.0, 0.5, 1.0]) for _ in range(12)]
    groups = [rng.choice("abc") for _ in rewards]
    everything = statistics.stdev(rewards)
    for baseline in ("mean", "leave_one_out"):
        for scale in ("none", "group", "batch"):
            got = group_advantages(rewards, groups, baseline=baseline, scale=scale)
            for i, advantage in enumerate(got):
                members = [j for j in range(12) if groups[j] == groups[i]]
                others = [j for j in members if j != i] if baseline != "mean" else members
                base = statistics.fmean(rewards[j] for j in others) if others else rewards[i]
                std = statistics.stdev([rewards[j] for j in members]) if members[1:] else 0.0
                divisor = {"none": 1.0, "group": std + 1e-4, "batch": everything + 1e-4}[scale]
                assert advantage == pytest.approx((rewards[i] - base) / divisor, abs=1e-9)


def test_order_changes_nothing() -> None:
    rewards, groups = [0.1, 0.7, 0.3, 0.9, 0.2], [0, 1, 0, 1, 0]
    plain = group_advantages(rewards, groups)
    order = [3, 0, 4, 2, 1]
    other = group_advantages([rewards[i] for i in order], [groups[i] for i in order])
    assert other == [plain[i] for i in order]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7], [0.3, None]])
def test_equal_rewards_give_exactly_zero(baseline: Any, rewards: list[float | None]) -> None:
    """0.1 + 0.1 + 0.1 is not 0.3: a difference of rounding divided by epsilon would be a signal."""
    for scale in ("none", "group", "batch"):
        groups = [0] * len(rewards)
        got = group_advantages(rewards, groups, baseline=baseline, scale=scale)
        assert got == [None if reward is None else 0.0 for reward in rewards]


def test_d5_keep_or_drop_groups_of_equal_rewards() -> None:
    documents = [_document(1.0, "a"), _document(0.0, "a"), _document(1.0, "b"), _document(1.0, "b")]
    keep = TokenBatch.from_documents(with_group_advantages(documents, scale="none"))
    drop = TokenBatch.from_documents(
        with_group_advantages(documents, scale="none", zero_variance="drop")
    )
    assert BatchCounts.of([keep]) == BatchCounts(8, 4)
    assert BatchCounts.of([drop]) == BatchCounts(4, 2)
    assert drop.columns["advantages"].tolist() == keep.columns["advantages"].tolist()


def test_d5_with_advantages_from_a_file() -> None:
    """Numerator and denominator both lose the group: -sum A / count is -0.5, then -1."""
    fields: dict[str, Any] = {"tokens": [0] * 5, "logprobs": None}
    documents = [
        _document(None, "a", advantage=1.0, **fields),
        _document(None, "b", advantage=0.0, **fields),
    ]
    for result, expected in ((documents, -0.5), (without_zero_groups(documents), -1.0)):
        (kwargs,) = TokenBatch.from_documents(result).to_kwargs()
        assert kwargs.advantages is not None
        assert -kwargs.advantages.sum() / kwargs.num_labels_in_batch == expected
    alone = [_document(None, None, advantage=a) for a in (0.0, 1.0)]
    counts = TokenBatch.from_documents(without_zero_groups(alone)).document_label_counts
    assert counts.tolist() == [0, 2]
    mixed = [_document(None, 7, advantage=[0.0, 0.0]), _document(None, 7, advantage=[0.0, -1.0])]
    assert without_zero_groups(mixed) == mixed


def test_without_labels_nothing_per_token_is_left() -> None:
    """Lists of completion tokens alone would not fit a document that has none."""
    kept = _document(None, kept_tokens=[[2, 5], [3]], advantage=[1.0, 2.0])
    (context,) = with_group_advantages([kept])
    assert not context.has_labels
    assert (context.kept_tokens, context.logprobs, context.advantage) == (None, None, None)
    assert TokenBatch.from_documents([context]).num_labels == 0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(DocumentError, match="document 1: `group_id` is required"):
        with_group_advantages([_document(1.0), _document(1.0, None)])
    with pytest.raises(ValueError, match="`group_ids` must have one value a reward"):
        group_advantages([1.0], [])
    with pytest.raises(DocumentError, match="document 0: `reward` must be finite"):
        group_advantages([math.inf], [0])
    for name in ("baseline", "scale"):
        choice: Any = {name: "median"}
        with pytest.raises(ValueError, match=f"`{name}` must be one of"):
            group_advantages([1.0], [0], **choice)
    with pytest.raises(ValueError, match="`zero_variance` must be one of"):
        with_group_advantages([], zero_variance="skip")  # type: ignore[arg-type]


def _part(rollout: int | str | None, reward: float | None, group: int = 0) -> Document:
    return Document([1, 2], prompt_length=1, reward=reward, group_id=group, rollout_id=rollout)


def test_parts_of_a_rollout_are_one_member_of_their_group() -> None:
    parts = [_part("a", 1.0), _part("a", None), _part("a", 1.0), _part("b", 0.0), _part(None, 0.5)]
    other = [_part("a", 0.0, group=1), _part("c", 2.0, group=1)]  # ids are those of the group
    whole = [_part(None, 1.0), _part(None, 0.0), _part(None, 0.5)]
    whole += [_part(None, 0.0, group=1), _part(None, 2.0, group=1)]
    got = [document.advantage for document in with_group_advantages([*parts, *other])]
    a, b, c, *rest = (document.advantage for document in with_group_advantages(whole))
    assert got == [a, a, a, b, c, *rest]
    assert all(document.has_labels for document in with_group_advantages(parts))
    unscored = [_part("a", None), _part("a", None), _part("b", 1.0)]
    assert [doc.has_labels for doc in with_group_advantages(unscored)] == [False, False, True]


def test_parts_of_a_rollout_with_two_rewards_are_refused() -> None:
    message = "document 1: `reward` must be that of its rollout, 1.0, or None, got 0.5"
    with pytest.raises(DocumentError, match=re.escape(message)):
        with_group_advantages([_part("a", 1.0), _part("a", 0.5)])
