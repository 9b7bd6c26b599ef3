"""Micro-batches that all data ranks can run together: equally many, with the same columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import torch
import torch.distributed as dist

from fastrl.data.batch import TokenBatch
from fastrl.data.columns import BATCH_COLUMNS
from fastrl.functional.batch import ENTRIES
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.parallel import ParallelGroups


def equal_batches(
    batches: Sequence[TokenBatch],
    groups: ParallelGroups | None = None,
    *,
    pad_to_multiple: int = 1,
) -> list[TokenBatch]:
    """The batches, and as many empty ones as the data rank with the most has more.

    An empty batch has no document and counts nowhere. All batches carry the optional values that
    any batch of any rank does, so that their losses run and their metrics have the same names:
    advantages and log-probabilities of 0 (there is no label that has them), versions of -1, rewards
    of NaN, no groups, no recorded entries.

    Args:
        batches: of this data rank; may be empty.
        groups: `dp`, over which the ranks agree in one all-reduce, whose result the host waits for.
        pad_to_multiple: the slots of an empty batch, all padding.

    Raises:
        ValueError: batches with labels carry a column, or a teacher's entries, on some ranks and
            not on others; the same on all ranks.
    """
    most, fields = _agreed(batches, groups)
    empty = TokenBatch.from_documents([], sequence_length=pad_to_multiple)
    return [_with_fields(batch, fields) for batch in [*batches, *[empty] * (most - len(batches))]]


def with_kept_tokens(batch: TokenBatch) -> TokenBatch:
    """The batch with a record of sampling sets: one without is of the whole vocabulary.

    For the micro-batches of documents of which some have sets, which not each of them need have.
    """
    if batch.kept_tokens is not None:
        return batch
    return replace(batch, kept_tokens=_no_entries(batch))


def _no_entries(batch: TokenBatch) -> KeptTokens:
    none = torch.zeros(0, dtype=torch.int64)
    return KeptTokens.from_counts(none, none.new_zeros(batch.padded_length))


# What all batches with labels have, or none of them. Documents without `kept_tokens` are over the
# whole vocabulary.
_OF_ALL = (*BATCH_COLUMNS, *(name for name in ENTRIES if name != "kept_tokens"))


def _fields(batch: TokenBatch) -> dict[str, bool]:
    """Which of the optional values a batch carries."""
    carries = {name: name in batch.columns for name in BATCH_COLUMNS}
    return carries | {
        "model_version": batch.model_versions is not None,
        "rewards": batch.rewards is not None,
        "group_ids": batch.group_ids is not None,
        **{name: name in batch.entries for name in ENTRIES},
    }


def _agreed(
    batches: Sequence[TokenBatch], groups: ParallelGroups | None
) -> tuple[int, dict[str, bool]]:
    """The most micro-batches of any data rank, and the optional values that any of them carries.

    All ranks get the same answer, and raise the same error.
    """
    given = [_fields(batch) for batch in batches]
    names = list(_fields(TokenBatch.from_documents([])))
    carried = [any(fields[name] for fields in given) for name in names]
    labelled = [fields for batch, fields in zip(batches, given, strict=True) if batch.num_labels]
    lacking = [any(not fields[name] for fields in labelled) for name in _OF_ALL]
    numbers = [len(batches), *map(int, carried), *map(int, lacking)]
    group = None if groups is None else groups.dp
    if group is not None:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        largest = torch.tensor(numbers, device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        numbers = largest.tolist()
    fields = dict(zip(names, map(bool, numbers[1:]), strict=False))
    is_lacking = dict(zip(_OF_ALL, numbers[1 + len(names) :], strict=True))
    if wrong := [name for name, lacks in is_lacking.items() if lacks and fields[name]]:
        raise ValueError(
            f"`documents` with labels must have {wrong} on all data ranks or on none, got some with"
            " and some without; give them to all, or name the `columns` to carry"
        )
    return numbers[0], fields


def _with_fields(batch: TokenBatch, fields: Mapping[str, bool]) -> TokenBatch:
    """The batch with all optional values of `fields`; those that it lacked say that it has none."""
    num_slots, num_documents = batch.padded_length, batch.num_documents
    columns = {name: torch.zeros(num_slots) for name in BATCH_COLUMNS if fields[name]}
    columns.pop("model_version", None)
    no_entries = _no_entries(batch)
    no_logprobs = replace(no_entries, logprobs=torch.zeros(0))
    missing: dict[str, Any] = {
        "model_versions": torch.full((num_documents,), -1) if fields["model_version"] else None,
        "rewards": torch.full((num_documents,), nan) if fields["rewards"] else None,
        "group_ids": (None,) * num_documents if fields["group_ids"] else None,
        "kept_tokens": no_entries if fields["kept_tokens"] else None,
        "teacher_tokens": no_logprobs if fields["teacher_tokens"] else None,
    }
    changes = {name: value for name, value in missing.items() if getattr(batch, name) is None}
    return replace(batch, columns=columns | batch.columns, **changes)
