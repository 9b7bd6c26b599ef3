"""Groups over a step, preference pairs, KL in rewards, recorded keep-sets."""

from __future__ import annotations

import math

import pytest

from fastrl import BatchCounts, Document, TokenBatch
from fastrl.data.advantages import with_kl_in_rewards
from fastrl.data.documents import DocumentError
from fastrl.data.preferences import preference_pairs


def document(num_labels: int, group: int | str | None = None) -> Document:
    return Document(tokens=[0] * (num_labels + 1), prompt_length=1, group_id=group)


def test_a_group_is_counted_over_the_batches_of_a_step() -> None:
    first = TokenBatch.from_documents([document(2, "a"), document(3, "b"), document(1, None)])
    second = TokenBatch.from_documents([document(4, "a"), document(0, "c")], pad_to_multiple=8)
    counts = BatchCounts.of([first, second])
    assert counts.num_groups_in_batch == 3  # a, b and the document without a group
    (one,) = first.to_kwargs(counts=counts)
    (two,) = second.to_kwargs(counts=counts)
    assert one.group_index is not None
    assert two.group_index is not None
    assert one.group_label_counts is not None
    assert two.group_label_counts is not None
    assert one.group_index.tolist() == [0] * 3 + [1] * 4 + [2] * 2
    assert one.group_label_counts.tolist() == [6] * 3 + [3] * 4 + [1] * 2
    assert two.group_index.tolist() == [0] * 5 + [1] + [-1] * 2
    assert two.group_label_counts.tolist() == [6] * 5 + [0] * 3
    assert (one.num_groups, two.num_groups) == (3, 2)


def test_without_groups_there_are_none() -> None:
    (batch,) = TokenBatch.from_documents([document(2)]).to_kwargs()
    assert batch.group_index is None
    assert batch.num_groups_in_batch == 0


def test_pairs_are_groups_of_two_signs() -> None:
    documents = preference_pairs([(document(1), document(2)), (document(3), document(4))])
    assert [x.advantage for x in documents] == [1.0, -1.0, 1.0, -1.0]
    assert documents[0].group_id == documents[1].group_id != documents[2].group_id


def test_kl_in_rewards_counts_the_learned_tokens() -> None:
    scored = Document(
        tokens=[0, 1, 2],
        loss_mask=[True, False, True],
        logprobs=[-9.0, -9.0, -1.0],
        ref_logprobs=[-1.0, -1.0, -1.5],
        reward=2.0,
    )
    unscored = Document(tokens=[0, 1], prompt_length=1, reward=math.nan)
    first, second = with_kl_in_rewards([scored, unscored], 0.1)
    assert first.reward == pytest.approx(2.0 - 0.1 * 0.5)
    assert second is unscored
    with pytest.raises(DocumentError, match="document 0: `ref_logprobs` is required for a KL"):
        with_kl_in_rewards(
            [Document(tokens=[0, 1], prompt_length=1, logprobs=[0.0], reward=1.0)], 1
        )
