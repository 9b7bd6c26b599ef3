"""One record of a rollout file: its fields, their types and the document that it gives.

Here: `RecordReader` and the record of a document. Files, lines and rows are in `rollouts.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import nan
from typing import Any

import numpy as np

from fastrl.config.base import UserError
from fastrl.data.checks import as_array, check_document, is_finite
from fastrl.data.columns import (
    ALIASES,
    DOCUMENT_COLUMNS,
    FILE_COLUMNS,
    LOGPROBS,
    PER_TOKEN,
    REQUIRABLE,
)
from fastrl.data.documents import Array, Document, DocumentError
from fastrl.data.rollout_rewards import combined_rewards

IGNORED = ("prompt", "completion", "text", "id", "metadata")
"""Columns for people, which a file may always carry and nothing reads."""

_ROUNDING = 0.05
"""A log-probability may be so far above 0, which 16-bit logits can give. More is another quantity,
such as a probability or a negative log-likelihood."""

_LOWEST = -1000.0
"""No model gives logits that differ by so much; less is a stand-in for a missing value. Divided by
the temperature where that is below 1."""

_TEMPERATURES = (1e-3, 1e3)
"""fp32 rounds logits of 50 by 3e-6. Over a lower temperature, the ratio would be off by more than
0.003; over a higher one, no logit makes a difference that training could use."""

_EXPECTED = {
    "integer": "an integer",
    "number": "a finite number",
    "text": "a text",
    "raw": "'raw'",
    "integers": "a list of integers",
    "booleans": "a list of booleans, or of 0 and 1",
    "numbers": "a list of numbers",
    "logprobs": "a list of numbers, null at tokens that are not learned",
    "lists": "a list of lists of integers",
    "mapping": "a finite number for each of several names",
    "logprob_lists": "a list of lists of numbers",
}
_LIST_ITEMS: dict[str, set[type]] = {
    "integers": {int},
    "booleans": {bool, int},
    "numbers": {int, float},
    "logprobs": {int, float, type(None)},
}
_ITEMS_OF_LISTS = {"lists": "integers", "logprob_lists": "numbers"}


class FieldError(ValueError):
    """A field of a record that cannot be read; whoever knows file and line adds them."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"`{column}` {problem}")
        self.column = column
        self.problem = problem


class BareConstant(float):
    """A NaN or Infinity in a JSON text, which JSON does not have."""

    def __repr__(self) -> str:
        return f"{super().__repr__()} (not JSON)"


@dataclass(frozen=True)
class RecordReader:
    """Makes documents of records.

    Attributes:
        require: fields out of `REQUIRABLE` that every record must have. "advantage" is also met by
            a `group_id` with a `reward`, null for unscored.
        ignore: more columns that the records may have and nothing reads.
        reward_columns: name -> weight of columns whose weighted sum is the reward, and unscored
            when one of them is null.
    """

    require: Collection[str] = ("logprobs", "advantage")
    ignore: Collection[str] = ()
    reward_columns: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses names that could have no effect."""
        if unknown := sorted(set(self.require) - set(REQUIRABLE)):
            raise ValueError(f"`require` must name fields of {REQUIRABLE}, got {unknown}")
        if clash := sorted({*self.ignore, *self.reward_columns} & set(FILE_COLUMNS)):
            raise UserError(f"`ignore` and `reward_columns` must not name {clash}, which are read")

    def columns_to_read(self, names: Collection[str]) -> list[str]:
        """The columns of a file that are read; refuses those that nobody knows."""
        known = {*FILE_COLUMNS, *self.reward_columns}
        for name in names:
            if name not in known and name not in IGNORED and name not in self.ignore:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean `{near[0]}`?" if near else "name it in `ignore` to skip it"
                raise FieldError(name, f"is not a column of rollout files; {hint}")
        return [name for name in names if name in known]

    def document(self, record: Mapping[str, Any]) -> Document:
        """The document of a record, checked.

        Raises:
            FieldError: naming the column as the record does, what is expected and what it holds.
        """
        present = self.columns_to_read(record)
        values = {name: record[name] for name in present if record[name] is not None}
        for name, value in values.items():
            column = FILE_COLUMNS.get(name)
            _check_kind(name, value, ["number"] if column is None else column.kinds)
        columns = _columns_of_fields(values)
        with_null = {columns[name] for name in LOGPROBS if None in values.get(columns[name], ())}
        for name in with_null:
            values[name] = [nan if value is None else value for value in values[name]]
        if self.reward_columns:
            values |= self._combined_reward(values)
        self._check_required(values, columns, has_reward="reward" in present)
        if "rollout_id" in values and "group_id" not in values:
            raise FieldError("rollout_id", "needs the `group_id` of its group, got none")
        document = Document(**_document_fields(values, columns, self.require))
        try:
            numbers = check_document(0, document)
        except DocumentError as error:
            source, problem = columns[error.field], error.problem
            if source in with_null:
                problem = problem.replace("got nan", "got null")
            raise FieldError(source, problem) from None
        _check_ranges(document.temperature, numbers, columns)
        return document

    def _combined_reward(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The reward and its parts; neither where one of them is missing."""
        names = list(self.reward_columns)
        for name in ("reward", "rewards"):
            if name in values:
                raise FieldError(name, f"is given although the reward is combined of {names}")
        rewards = {name: values[name] for name in names if name in values}
        columns = {name: [rewards.get(name)] for name in names}
        (reward,) = combined_rewards(columns, self.reward_columns)
        return {} if reward is None else {"reward": reward, "rewards": rewards}

    def _check_required(
        self, values: Mapping[str, Any], columns: Mapping[str, str], *, has_reward: bool
    ) -> None:
        has_group_reward = "group_id" in values and (has_reward or bool(self.reward_columns))
        for name in self.require:
            if columns[name] in values or (name == "advantage" and has_group_reward):
                continue
            other = " (or a `reward` and a `group_id`)" if name == "advantage" else ""
            raise FieldError(name, f"is required{other}, got none")


def record_of(number: int, document: Document) -> dict[str, Any]:
    """The record of a document: plain Python values, all finite, fields without value left out.

    Raises:
        DocumentError: naming document `number`, for values that a file cannot hold.
    """
    check_document(number, document)
    record = {
        name: _plain(number, name, value)
        for name in DOCUMENT_COLUMNS
        if (value := getattr(document, name)) is not None
    }
    if not document.is_scored:
        record.pop("reward", None)
        if document.group_id is not None:
            record["reward"] = None
    if document.alignment == "token":
        del record["alignment"]
    return record


def _plain(number: int, name: str, value: Any) -> Any:
    """A value as JSON and Parquet take it."""
    kinds = DOCUMENT_COLUMNS[name].kinds
    if isinstance(value, str):
        return value
    if kinds == ["mapping"]:
        return {key: float(each) for key, each in value.items()}
    if kinds[0] in _ITEMS_OF_LISTS:
        dtype = np.int64 if kinds == ["lists"] else np.float64
        return [as_array(number, name, each).astype(dtype).tolist() for each in value]
    if kinds[0] in ("integer", "number") and (kinds[-1] != "numbers" or np.ndim(value) == 0):
        return int(value) if kinds[0] == "integer" else float(value)
    array = as_array(number, name, value)
    if kinds[-1] in ("integers", "booleans"):
        return (array if kinds == ["integers"] else array.astype(np.bool_)).tolist()
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise DocumentError(number, name, "must be finite at every token to be written")
    return array.tolist()


def _check_ranges(
    temperature: float, numbers: Mapping[str, Array], columns: Mapping[str, str]
) -> None:
    """Refuses temperatures of no use in fp32, and values that are no log-probabilities."""
    low, high = _TEMPERATURES
    if not low <= temperature <= high:
        problem = f"must be from {low:g} to {high:g}, as fp32 allows, got {temperature}"
        raise FieldError("temperature", problem)
    lowest = _LOWEST / min(temperature, 1)
    for name in LOGPROBS:
        if name not in numbers:
            continue
        if (got := numbers[name].max()) > _ROUNDING:
            problem = f"must be log-probabilities, at most 0, got {got:.6g}"
            raise FieldError(columns[name], problem)
        if (got := numbers[name].min()) < lowest:
            problem = f"must be log-probabilities, at least {lowest:g}, got {got:.6g}"
            raise FieldError(columns[name], f"{problem}; a token without one must not be learned")
    squares = numbers.get("sum_squares", np.zeros(1))
    if squares.min() < 0 or squares.max() > 1 + _ROUNDING:
        problem = f"must be sums of squared probabilities, from 0 to 1, got {squares.min():.6g}"
        raise FieldError("sum_squares", f"{problem} to {squares.max():.6g}")


def _check_kind(name: str, value: Any, kinds: Sequence[str]) -> None:
    """Refuses a value of another type; numbers may be integers, but text is never a number."""
    if any(_is_of_kind(value, one) for one in kinds):
        return
    expected = " or ".join(_EXPECTED[one] for one in kinds)
    items = next((_LIST_ITEMS[one] for one in kinds if one in _LIST_ITEMS), None)
    if items is None or not isinstance(value, list):
        raise FieldError(name, f"must be {expected}, got {_shown(value)}")
    position = next(i for i, item in enumerate(value) if type(item) not in items)
    problem = f"must be {expected}, got {_shown(value[position])} at position {position}"
    raise FieldError(name, problem)


def _is_of_kind(value: Any, kind: str) -> bool:
    if kind in _LIST_ITEMS:
        return isinstance(value, list) and set(map(type, value)) <= _LIST_ITEMS[kind]
    if kind in _ITEMS_OF_LISTS:
        item_kind = _ITEMS_OF_LISTS[kind]
        return isinstance(value, list) and all(_is_of_kind(item, item_kind) for item in value)
    if kind == "number":
        return type(value) in (int, float) and is_finite(value)
    if kind == "mapping":
        numbers = value.values() if isinstance(value, dict) else (None,)
        return all(_is_of_kind(each, "number") for each in numbers)
    if kind == "raw":
        return bool(value == "raw")
    return type(value) is (int if kind == "integer" else str)


def _shown(value: Any) -> str:
    """A value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _columns_of_fields(values: Mapping[str, Any]) -> dict[str, str]:
    """For each field of a document the column that gives it; refuses two columns for one field."""
    columns = {name: name for name in DOCUMENT_COLUMNS}
    for name, alias in ALIASES.items():
        if name in values and alias in values:
            raise FieldError(alias, f"is given twice, also as `{name}`")
        if alias in values:
            columns[name] = alias
    is_split = "prompt_ids" in values or "completion_ids" in values
    if is_split:
        for name in ("tokens", "prompt_length", "loss_mask"):
            if name in values:
                raise FieldError(name, "must not be given beside `prompt_ids` and `completion_ids`")
        for name in ("prompt_ids", "completion_ids"):
            if name not in values:
                raise FieldError(name, "is required beside the other half of the tokens, got none")
    elif "completion_mask" in values:
        raise FieldError("completion_mask", "needs `prompt_ids` and `completion_ids`")
    elif "tokens" not in values:
        raise FieldError("tokens", "(or `prompt_ids` and `completion_ids`) is required, got none")
    return columns


def _document_fields(
    values: Mapping[str, Any], columns: Mapping[str, str], require: Collection[str]
) -> dict[str, Any]:
    """Arguments of `Document`."""
    fields = {name: values[columns[name]] for name in DOCUMENT_COLUMNS if columns[name] in values}
    if fields.get("logprobs_temperature") == "raw":
        fields["logprobs_temperature"] = 1.0
    for name in LOGPROBS:
        # A sampler that was not asked for log-probabilities may write an empty list.
        if fields.get(name) == [] and name not in require:
            del fields[name]
    if "completion_ids" not in values:
        return fields
    prompt, completion = values["prompt_ids"], values["completion_ids"]
    fields["tokens"] = prompt + completion
    fields["alignment"] = "token"
    lead = 0
    if "completion_mask" in values:
        lead = len(prompt)  # of no effect, as the prompt has no labels
        fields["loss_mask"] = [0] * lead + _of_completion(values, "completion_mask")
    else:
        fields["prompt_length"] = len(prompt)
    for name in PER_TOKEN:
        if isinstance(fields.get(name), list):
            filler: Any = [] if DOCUMENT_COLUMNS[name].kind in _ITEMS_OF_LISTS else 0.0
            fields[name] = [filler] * lead + _of_completion(values, columns[name])
    return fields


def _of_completion(values: Mapping[str, Any], name: str) -> list[Any]:
    expected, got = len(values["completion_ids"]), len(values[name])
    if got != expected:
        problem = f"must have {expected} values, one a completion token, got {got}"
        raise FieldError(name, f"{problem}; none are padded or cut")
    result: list[Any] = values[name]
    return result
