"""Recorded teachers and weights of streams, from documents and files to batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastrl import BatchCounts, BatchKwargs, Document, TokenBatch
from fastrl.data.equal_batches import equal_batches
from fastrl.data.padded import documents_from_padded
from fastrl.data.rollouts import RolloutFileError, read_rollouts, write_rollouts
from fastrl.functional.kept_tokens import KeptTokens

FIRST = Document(
    [5, 6, 7],
    prompt_length=1,
    teacher_ids=[[6, 1], [7, 2, 3]],
    teacher_logprobs=[[-0.5, -1.5], [-1.0, -2.0, -3.0]],
    rl_weight=2.0,
    ce_weight=[0.0, 0.5],
)
SECOND = Document(
    [8, 9], prompt_length=1, teacher_ids=[[9]], teacher_logprobs=[[-0.25]], rl_weight=0, ce_weight=1
)
BARE = Document([3, 4], prompt_length=2)  # without a label


def rows(batch: BatchKwargs) -> list[list[tuple[int, float]]]:
    """The entries of each slot."""
    entries = batch.teacher_tokens
    assert entries is not None
    assert entries.logprobs is not None
    result: list[list[tuple[int, float]]] = [[] for _ in range(entries.num_slots)]
    triples = zip(
        entries.slots.tolist(), entries.ids.tolist(), entries.logprobs.tolist(), strict=True
    )
    for slot, entry, value in triples:
        result[slot].append((entry, value))
    return result


def test_values_move_to_their_labels() -> None:
    packed = TokenBatch.from_documents([FIRST, SECOND, BARE], pad_to_multiple=8)
    (batch,) = packed.to_kwargs()
    of_first = [[(6, -0.5), (1, -1.5)], [(7, -1.0), (2, -2.0), (3, -3.0)]]
    assert rows(batch) == [*of_first, [], [(9, -0.25)], [], [], [], []]
    for copy in (batch.to("cpu"), batch.sent_to("cpu", pin_memory=False)):
        assert rows(copy) == rows(batch)
    assert rows(batch.select(torch.tensor([3, 1]))) == [[(9, -0.25)], of_first[1]]
    assert batch.rl_weights is not None
    assert batch.rl_weights.tolist() == [2, 2, 0, 0, 0, 0, 0, 0]
    assert batch.ce_weights is not None
    assert batch.ce_weights.tolist() == [0, 0.5, 0, 1, 0, 0, 0, 0]
    assert batch.distill_weights is None
    assert batch.stream_counts["ce"].label_counts.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    first, second = packed.to_kwargs(micro_sequences=2)
    assert rows(first) + rows(second) == rows(batch)
    assert second.stream_counts["rl"].num_labels_in_batch == 2
    halves = [packed.shard(BatchCounts.of([packed]), rank=rank, size=2)[0] for rank in range(2)]
    assert [*rows(halves[0]), *rows(halves[1])] == rows(batch)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_they_survive_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rollouts{suffix}"
    write_rollouts(path, [FIRST, SECOND])
    first, second = read_rollouts(path, require=["rl_weight", "ce_weight"])
    assert (first.teacher_ids, first.teacher_logprobs) == (
        FIRST.teacher_ids,
        FIRST.teacher_logprobs,
    )
    assert (first.rl_weight, first.ce_weight) == (2.0, [0.0, 0.5])
    assert (second.rl_weight, second.ce_weight) == (0.0, 1.0)
    with pytest.raises(RolloutFileError, match="`distill_weight` is required, got none"):
        list(read_rollouts(path, require=["distill_weight"]))


def test_a_file_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [FIRST])
    text = path.read_text(encoding="utf-8")
    for old, new, message in (
        ("[-0.5, -1.5]", "[-0.5, null]", "must be a list of lists of numbers"),
        ("[-0.5, -1.5]", "[-0.5]", "one value for each of the 2 `teacher_ids`"),
        ('"rl_weight": 2.0', '"rl_weight": -2.0', "`rl_weight` must be at least 0"),
    ):
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(RolloutFileError, match=f"line 1: .*{message}"):
            list(read_rollouts(path, require=[]))


def test_empty_batches_of_a_step_carry_them_too() -> None:
    batch = TokenBatch.from_documents([FIRST])
    empty = TokenBatch.from_documents([])
    batch, empty = equal_batches([batch, empty])
    assert isinstance(empty.teacher_tokens, KeptTokens)
    assert empty.teacher_tokens.logprobs is not None
    assert empty.columns.keys() == batch.columns.keys() == {"rl_weights", "ce_weights"}
    (kwargs,) = empty.to_kwargs()
    assert set(kwargs.stream_counts) == {"rl", "ce"}
    without = TokenBatch.from_documents([replace(FIRST, teacher_ids=None, teacher_logprobs=None)])
    with pytest.raises(ValueError, match=r"must have \['teacher_tokens'\] on all data ranks"):
        equal_batches([batch, without])


def test_padded_rows_have_weights() -> None:
    tokens, mask = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    documents = documents_from_padded(
        tokens, mask, mask[:, 1:], rl_weight=torch.tensor([1.0, 0.5]), ce_weight=mask[:, 1:] * 2.0
    )
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    assert batch.rl_weights is not None
    assert batch.ce_weights is not None
    assert batch.rl_weights.tolist() == [1, 1, 0, 0.5, 0]
    assert batch.ce_weights.tolist() == [2, 2, 0, 2, 0]
