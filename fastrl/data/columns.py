"""The columns of documents, rollout files and batches, one row each.

Here: the fields of `Document` as files have them, and what follows for batches. Which field gives
which column of a batch stands in `fastrl.functional.batch`. Checks of values are in `checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.functional.batch import ENTRIES, SOURCES
from fastrl.functional.streams import STREAMS


@dataclass(frozen=True)
class Column:
    """A field of `Document`, and the column of that name in rollout files.

    Attributes:
        kind: of its values in files, "|" between alternatives. "logprobs" are numbers too: nats,
            at most 0, at the temperature of the document; "logprob_lists" lists of such.
        alias: its name in the files of TRL.
        per_token: it has values of the labels, and none without labels.
        requirable: a reader may require it, and the labelled documents of a batch must have it or
            lack it together. What computes advantages may take the place of `advantage`.
    """

    kind: str
    alias: str | None = None
    per_token: bool = False
    requirable: bool = False

    @property
    def kinds(self) -> list[str]:
        """The alternatives."""
        return self.kind.split("|")


def _logprobs(alias: str) -> Column:
    return Column("logprobs", alias, per_token=True, requirable=True)


def _weights(alias: str) -> Column:
    return Column("number|numbers", alias, per_token=True, requirable=True)


DOCUMENT_COLUMNS = {
    "tokens": Column("integers"),
    "prompt_length": Column("integer"),
    "loss_mask": Column("booleans"),
    "logprobs": _logprobs("old_per_token_logps"),
    "ref_logprobs": _logprobs("ref_per_token_logps"),
    "rollout_logprobs": _logprobs("sampling_per_token_logps"),
    "advantage": Column("number|numbers", "advantages", per_token=True, requirable=True),
    "rl_weight": _weights("rl_weights"),
    "ce_weight": _weights("ce_weights"),
    "distill_weight": _weights("distill_weights"),
    "temperature": Column("number"),
    "model_version": Column("integer", requirable=True),
    "reward": Column("number"),
    "group_id": Column("integer|text"),
    "rollout_id": Column("integer|text"),
    "alignment": Column("text"),
    "logprobs_temperature": Column("number|raw"),
    "kept_tokens": Column("lists", per_token=True),
    "rewards": Column("mapping"),
    "greedy_reward": Column("number"),
    "sum_squares": Column("numbers", per_token=True),
    "values": Column("numbers", per_token=True, requirable=True),
    "returns": Column("numbers", per_token=True, requirable=True),
    "teacher_ids": Column("lists", per_token=True),
    "teacher_logprobs": Column("logprob_lists", per_token=True),
}
"""Every field of `Document`, in the order of the columns of files."""

SPLIT_COLUMNS = {
    "prompt_ids": Column("integers"),
    "completion_ids": Column("integers"),
    "completion_mask": Column("booleans"),
}
"""Columns of TRL that give `tokens` and `prompt_length` or `loss_mask` together."""

ALIASES = {name: column.alias for name, column in DOCUMENT_COLUMNS.items() if column.alias}
"""Fields that TRL, or weights of streams that prime-rl, know under another name."""

FILE_COLUMNS = {
    **DOCUMENT_COLUMNS,
    **SPLIT_COLUMNS,
    **{alias: DOCUMENT_COLUMNS[name] for name, alias in ALIASES.items()},
}
"""Every column of files that is read."""

ENTRY_FIELDS = [field for fields in ENTRIES.values() for field in fields]
WEIGHTS = [f"{stream}_weight" for stream in STREAMS]
LOGPROBS = [name for name, column in DOCUMENT_COLUMNS.items() if column.kind == "logprobs"]
PER_TOKEN = [name for name, column in DOCUMENT_COLUMNS.items() if column.per_token]
TOKEN_NUMBERS = [name for name in PER_TOKEN if not DOCUMENT_COLUMNS[name].kind.endswith("lists")]
REQUIRABLE = [name for name, column in DOCUMENT_COLUMNS.items() if column.requirable]

BATCH_COLUMNS = {name: field for name, field in SOURCES.items() if field in REQUIRABLE}
"""The optional columns of a batch, and the field that each is read from."""
