"""The checks of a document; whoever needs its values gets them here, in token alignment.

Token alignment throughout: value i belongs to token i. The shift is in `label_shift.py`.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral, Real
from sys import float_info
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fastrl.data.columns import DOCUMENT_COLUMNS, LOGPROBS, TOKEN_NUMBERS, WEIGHTS
from fastrl.data.documents import Array, Document, DocumentError

HIGHEST_MASS = 1.05
"""Probabilities of 16-bit logits may sum to so much."""

_FLOAT64 = (torch.float64, np.dtype(np.float64))


def check_document(number: int, document: Document) -> dict[str, Array]:
    """The per-token numbers [n] of a document by field, 0 where a token is no label.

    They are fp32, or float64 as `float_dtype` says.

    Args:
        number: of the document, for errors.
        document: checked whole: all that `shift_documents` refuses of a document is refused.

    Raises:
        DocumentError: naming the document, the field, what is required and what was given.
    """
    _, learned = checked_tokens(number, document)
    values = {
        field: label_values(number, document, field, learned)
        for field in TOKEN_NUMBERS
        if getattr(document, field) is not None
    }
    id_lists(number, document, "kept_tokens", learned)
    teacher_lists(number, document, learned)
    return values


def checked_tokens(number: int, document: Document) -> tuple[Array, Array]:
    """The [n] int64 ids of a document, and [n] which tokens are labels; checks scalars as well."""
    ids = _token_ids(number, document)
    learned = _learned_tokens(number, document, len(ids))
    _check_scalars(number, document)
    return ids, learned


def unlabelled_prefix(number: int, document: Document) -> Array:
    """The ids [m] of the tokens before the one that predicts the first label; all without labels.

    Raises:
        DocumentError: these ids, or what says which tokens are labels, cannot be read.
    """
    learned = _learned_tokens(number, document, len(document.tokens))
    length = int(learned.argmax()) - 1 if learned.any() else len(learned)
    if length == 0:
        return np.zeros(0, np.int64)
    return _token_ids(number, replace(document, tokens=document.tokens[:length]))


def _token_ids(number: int, document: Document) -> Array:
    """[n] int64 token ids."""
    tokens = as_array(number, "tokens", document.tokens)
    if len(tokens) == 0:
        raise DocumentError(number, "tokens", "must hold at least one token, got none")
    if tokens.dtype.kind not in "iu":
        raise DocumentError(number, "tokens", f"must be integers, got {_dtype_name(tokens)}")
    ids = tokens.astype(np.int64, copy=False)  # an id above the range turns negative
    if ids.min() < 0:
        position = int(ids.argmin())
        got = document.tokens[position]
        problem = f"must be ids from 0 to 2^63 - 1, got {got} at position {position}"
        raise DocumentError(number, "tokens", problem)
    return ids


def _learned_tokens(number: int, document: Document, length: int) -> Array:
    """[n] booleans: which tokens are labels. The first never is, as nothing predicts it."""
    if (document.prompt_length is None) == (document.loss_mask is None):
        given = "neither" if document.prompt_length is None else "both"
        problem = f"or `loss_mask` is required, exactly one of them, got {given}"
        raise DocumentError(number, "prompt_length", problem)
    if document.prompt_length is not None:
        prompt = document.prompt_length
        if not _is_integer(prompt) or not 0 <= prompt <= length:
            problem = f"must be an integer from 0 to {length} (the tokens), got {prompt!r}"
            raise DocumentError(number, "prompt_length", problem)
        return np.arange(length) >= max(prompt, 1)
    mask = as_array(number, "loss_mask", document.loss_mask)
    if len(mask) != length:
        problem = f"must have {length} values, one a token, got {len(mask)}"
        raise DocumentError(number, "loss_mask", problem)
    if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        problem = f"must be booleans, or integers 0 and 1, got {_dtype_name(mask)}"
        raise DocumentError(number, "loss_mask", problem)
    learned = mask.astype(np.bool_)
    learned[0] = False
    return learned


def _check_scalars(number: int, document: Document) -> None:
    """Refuses temperatures, versions, rewards and alignments that mean nothing."""
    for field in ("temperature", "logprobs_temperature"):
        value = getattr(document, field)
        if field == "logprobs_temperature" and value is None:
            continue
        if not is_finite(value) or not value > 0:
            raise DocumentError(number, field, f"must be a finite number above 0, got {value!r}")
    if document.alignment not in ("token", "label"):
        problem = f"must be 'token' or 'label', got {document.alignment!r}"
        raise DocumentError(number, "alignment", problem)
    if document.logprobs_temperature not in (None, document.temperature):
        for field in (*LOGPROBS, "teacher_logprobs"):
            if getattr(document, field) is not None:
                problem = (
                    f"must be taken at the temperature {document.temperature} of the document, got "
                    f"values at {document.logprobs_temperature}, which cannot be converted; let "
                    "the sampler report them after temperature, or compute them again"
                )
                raise DocumentError(number, field, problem)
    version = document.model_version
    if version is not None and not (_is_integer(version) and 0 <= version < 2**63):
        bound = "below 2^63" if _is_integer(version) and version > 0 else "of at least 0"
        problem = f"must be an integer {bound}, got {version!r}"
        raise DocumentError(number, "model_version", problem)
    rewards = {"reward": document.reward, "greedy_reward": document.greedy_reward}
    for field, reward in rewards.items():
        if not (reward is None or is_finite(reward) or (_is_real(reward) and reward != reward)):
            problem = f"must be a finite number, or None for unscored, got {reward!r}"
            raise DocumentError(number, field, problem)
    for name, reward in (document.rewards or {}).items():
        if not is_finite(reward):
            raise DocumentError(number, "rewards", f"must be finite, got {reward!r} of {name!r}")


def label_values(
    number: int,
    document: Document,
    field: str,
    learned: Array,  # [n]
) -> Array:  # [n]
    """[n] values of a per-token field, 0 where a token is no label or has no value.

    In `float_dtype(document)`; the range of fp32 is required of float64 too.
    """
    values = getattr(document, field)
    by_token = np.zeros(len(learned), dtype=float_dtype(document))
    if values is None:
        return by_token
    is_scalar = "number" in DOCUMENT_COLUMNS[field].kinds and (
        _is_real(values) or np.ndim(values) == 0
    )
    if is_scalar:
        if not is_finite(values := _scalar(values)):
            raise DocumentError(number, field, f"must be a finite number, got {values!r}")
        array, first = values, 0
    else:
        array = as_array(number, field, values)
        if array.dtype.kind not in "fiu":
            raise DocumentError(number, field, f"must be numbers, got {_dtype_name(array)}")
        first = _num_before(number, document, field, len(array), "values")
    with np.errstate(over="ignore"):  # what overflows fp32 is refused as infinite below
        by_token[first:] = array
    by_token[~learned] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        is_usable = np.isfinite(by_token.astype(np.float32, copy=False))
    if not is_usable.all():
        position = int(is_usable.argmin())
        got = f"got {by_token[position]} for token {position}"
        raise DocumentError(number, field, f"must be finite fp32 at every label, {got}")
    if field in WEIGHTS and (by_token < 0).any():
        problem = f"must be at least 0, got {by_token.min()} for token {int(by_token.argmin())}"
        raise DocumentError(number, field, problem)
    return by_token


def float_dtype(document: Document) -> type[np.floating[Any]]:
    """float64 if an array or tensor of the document's per-token numbers is, else fp32.

    Python numbers (numpy's scalars among them) and sequences of them do not ask for float64.
    """
    given = (getattr(document, field) for field in TOKEN_NUMBERS)
    arrays = (values.dtype for values in given if _is_array(values))
    return np.float64 if any(dtype in _FLOAT64 for dtype in arrays) else np.float32


def id_lists(
    number: int,
    document: Document,
    field: str,
    learned: Array,  # [n]
) -> list[Array]:
    """[n] lists of ids of a field, empty where none are given; a label's must have an entry."""
    values = getattr(document, field)
    if values is None:
        return [np.zeros(0, np.int64)] * len(document.tokens)
    lists = [np.zeros(0, np.int64)] * _num_before(number, document, field, len(values), "lists")
    for each in values:
        array = as_array(number, field, each)
        if len(array) and (array.dtype.kind not in "iu" or array.min() < 0):
            raise DocumentError(number, field, "must hold ids of at least 0 alone")
        lists.append(array.astype(np.int64))
    for position, ids in enumerate(lists):
        if learned[position] and len(ids) == 0:
            problem = f"must hold an id at least for each label, got none for token {position}"
            raise DocumentError(number, field, problem)
    return lists


def teacher_lists(
    number: int,
    document: Document,
    learned: Array,  # [n]
) -> tuple[list[Array], list[Array]]:
    """[n] lists of `teacher_ids` and of `teacher_logprobs`, empty where none are given."""
    given = [document.teacher_ids is not None, document.teacher_logprobs is not None]
    if any(given) and not all(given):
        missing, there = ("teacher_ids", "teacher_logprobs")[:: -1 if given[0] else 1]
        raise DocumentError(number, missing, f"is required beside `{there}`, got none")
    lists = id_lists(number, document, "teacher_ids", learned)
    logprobs = [np.zeros(0, np.float32)] * len(lists)
    if document.teacher_logprobs is None:
        return lists, logprobs
    values = document.teacher_logprobs
    field = "teacher_logprobs"
    first = _num_before(number, document, field, len(values), "lists")
    for position, each in enumerate(values, start=first):
        array = as_array(number, field, each)
        if len(array) != len(lists[position]):
            problem = (
                f"must have one value for each of the {len(lists[position])} `teacher_ids`, got"
                f" {len(array)} for token {position}"
            )
            raise DocumentError(number, field, problem)
        if learned[position]:
            _check_teacher(number, position, lists[position], array)
        dtype = np.float64 if array.dtype == np.float64 and _is_array(each) else np.float32
        logprobs[position] = array.astype(dtype)
    return lists, logprobs


def _check_teacher(number: int, position: int, ids: Array, logprobs: Array) -> None:
    """Refuses what is no part of a distribution."""
    if len(np.unique(ids)) < len(ids):
        problem = f"must be different ids, got one twice for token {position}"
        raise DocumentError(number, "teacher_ids", problem)
    is_number = logprobs.dtype.kind in "fiu" and bool(np.isfinite(logprobs).all())
    mass = float(np.exp(logprobs, dtype=np.float64).sum()) if is_number else np.nan
    if not mass <= HIGHEST_MASS:
        got = f"a sum of {mass:.6g}" if is_number else "another value"
        problem = (
            "must be finite log-probabilities, of probabilities that sum to at most 1, got"
            f" {got} for token {position}; leave out ids without one"
        )
        raise DocumentError(number, "teacher_logprobs", problem)


def _num_before(number: int, document: Document, field: str, given: int, what: str) -> int:
    """The number of tokens before those that have a value: all layouts end at the last token."""
    length = len(document.tokens)
    allowed = {length: "token"} if document.alignment == "token" else {length - 1: "label"}
    if document.prompt_length is not None:
        allowed.setdefault(length - document.prompt_length, "completion token")
    if given not in allowed:
        choices = " or ".join(f"{count} (one a {each})" for count, each in allowed.items())
        problem = f"must have {choices} {what}, got {given}; none are padded or cut"
        raise DocumentError(number, field, problem)
    return length - given


def as_array(number: int, field: str, values: Any) -> Array:
    """The values of a field as a one-dimensional array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:  # nested sequences of unequal lengths
        raise DocumentError(number, field, f"must be a flat sequence: {error}") from None
    if array.ndim != 1:
        problem = f"must be a flat sequence, got {array.ndim} dimensions"
        raise DocumentError(number, field, problem)
    return array


def is_finite(value: Any) -> bool:
    """Whether a value is a real number (no boolean) within the range of a float."""
    return _is_real(value) and abs(value) <= float_info.max


def _scalar(value: Any) -> Any:
    """The Python number of a zero-dimensional array or tensor; other values as they are."""
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _is_array(values: object) -> TypeGuard[Array | Tensor]:
    return isinstance(values, Tensor | np.ndarray)


def _dtype_name(array: Array) -> str:
    return "other values" if array.dtype.kind in "OUS" else str(array.dtype)


def _is_integer(value: object) -> bool:
    # The plain type first: the check of an abstract class costs ten times as much.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_real(value: object) -> bool:
    return type(value) in (float, int) or (isinstance(value, Real) and not isinstance(value, bool))
