"""Documents and their one and only label shift.

Here: `Document` (token alignment, as on disk) and `shift_documents`, which checks documents, joins
them and moves every value of token i + 1 to slot i, inside documents. Not here: padding, counts
over ranks and slices (`batch.py`); files (`rollouts.py`). Nothing downstream shifts or rolls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from sys import float_info
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE_LABEL = -100

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = Sequence[int] | Array | Tensor
Booleans: TypeAlias = Sequence[bool] | Sequence[int] | Array | Tensor
Floats: TypeAlias = Sequence[float] | Array | Tensor

TOKEN_COLUMNS = {
    "advantages": "advantage",
    "old_logprobs": "logprobs",
    "ref_logprobs": "ref_logprobs",
    "rollout_logprobs": "rollout_logprobs",
}
"""Per-token columns of a batch, and the field of `Document` that each is read from."""

COLUMNS = (*TOKEN_COLUMNS, "model_version")
"""All optional columns of a batch that the labelled documents must have or lack together."""

_LOGPROB_FIELDS = ("logprobs", "ref_logprobs", "rollout_logprobs")


class DocumentError(ValueError):
    """A document that cannot be used.

    Attributes:
        number: 0-based number of the document among those given.
        field: name of the offending field of `Document`.
        problem: what is required and what was given.
    """

    def __init__(self, number: int, field: str, problem: str) -> None:
        super().__init__(f"document {number}: `{field}` {problem}")
        self.number = number
        self.field = field
        self.problem = problem


@dataclass(frozen=True)
class Document:
    """One prompt with its completion (or a plain text), in token alignment.

    Value i of a field belongs to `tokens[i]`: `logprobs[i]` is the log-probability (nats) of
    `tokens[i]` given the tokens before it. Nothing predicts the first token, so `loss_mask[0]` has
    no effect. Fields may be sequences, numpy arrays or tensors. They are checked when a batch is
    made, which can then name the document.

    Attributes:
        tokens: [n] token ids, n >= 1.
        prompt_length: the first so many tokens are context and get no label. Exactly one of
            `prompt_length` and `loss_mask` is given.
        loss_mask: [n] True (or 1) where the token is to be learned.
        logprobs: under the policy that the ratio is taken to (old). [n], or with `prompt_length`
            also [n - prompt_length]: the completion's alone.
        ref_logprobs: under the frozen reference, same lengths.
        rollout_logprobs: as the sampler reported them, same lengths.
        advantage: of the document, or per token (same lengths).
        temperature: that the document was sampled at, and at which all log-probabilities are taken.
        model_version: of the weights that sampled the document.
        reward: of the document; None or NaN is unscored. A batch only carries it for metrics:
            advantages come from `fastrl.data.advantages`.
        group_id: documents with one id answer the same prompt.
        alignment: "label" says that the log-probabilities and per-token advantages have [n - 1]
            values, value i for `tokens[i + 1]`: what `logits[:-1]` and
            `TokenBatch.split_by_document` give. The completion's alone read the same both ways.
        logprobs_temperature: that the log-probabilities were taken at, where the producer says so.
            Values taken at another temperature than `temperature` are refused, as log-probabilities
            of single tokens cannot be converted.
        kept_tokens: for each token (same lengths as the log-probabilities) the ids that the sampler
            drew it from, such as its top-p set; the token itself counts as one of them.
    """

    tokens: Integers
    prompt_length: int | None = None
    loss_mask: Booleans | None = None
    logprobs: Floats | None = None
    ref_logprobs: Floats | None = None
    rollout_logprobs: Floats | None = None
    advantage: float | Floats | None = None
    temperature: float = 1.0
    model_version: int | None = None
    reward: float | None = None
    group_id: int | str | None = None
    alignment: Literal["token", "label"] = "token"
    logprobs_temperature: float | None = None
    kept_tokens: Sequence[Integers] | None = None


@dataclass(frozen=True)
class ShiftedDocuments:
    """Joined documents in label alignment; T tokens, N documents, numpy arrays on the host."""

    tokens: Array  # [T] int64
    labels: Array  # [T] int64
    positions: Array  # [T] int64
    document_index: Array  # [T] int64
    columns: dict[str, Array]  # [T] fp32 each, 0 at slots without label
    lengths: Array  # [N] int64
    label_counts: Array  # [N] int64
    temperatures: Array  # [N] float64
    model_versions: Array | None  # [N] int64, -1 = none (documents without label only)
    rewards: Array | None  # [N] fp32, NaN = none


def shift_documents(
    documents: Sequence[Document], columns: Collection[str] | None = None
) -> ShiftedDocuments:
    """Joins documents and moves the values of token i + 1 to slot i, inside each document.

        labels[i] = tokens[i + 1] if i + 1 is in the document and to be learned, else -100

    Args:
        documents: checked here; any number, also none.
        columns: names out of `COLUMNS` that the result must carry, no others. A document with
            labels that lacks one is refused. None: the columns that any document has.

    Raises:
        DocumentError: naming the document, the field, what is required and what was given.
    """
    tokens, lengths = _joined_tokens(documents)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    learned = np.zeros(len(tokens), dtype=np.bool_)
    for number, document in enumerate(documents):
        _mark_learned(number, document, learned[starts[number] : ends[number]])
    labelled = np.zeros_like(learned)
    labelled[:-1] = learned[1:]
    labelled[ends - 1] = False
    labels = np.full(len(tokens), IGNORE_LABEL, dtype=np.int64)
    labels[:-1] = np.where(labelled[:-1], tokens[1:], IGNORE_LABEL)
    document_index = np.repeat(np.arange(len(documents)), lengths)
    label_counts = np.bincount(document_index[labelled], minlength=len(documents))

    for number, document in enumerate(documents):
        _check_scalars(number, document)
    carried = _carried_columns(documents, label_counts, columns)
    return ShiftedDocuments(
        tokens=tokens,
        labels=labels,
        positions=np.arange(len(tokens)) - np.repeat(starts, lengths),
        document_index=document_index,
        columns={
            name: _shifted_column(documents, TOKEN_COLUMNS[name], starts, ends, labelled)
            for name in carried
            if name in TOKEN_COLUMNS
        },
        lengths=lengths,
        label_counts=label_counts.astype(np.int64),
        temperatures=np.array([document.temperature for document in documents], dtype=np.float64),
        model_versions=_model_versions(documents) if "model_version" in carried else None,
        rewards=_rewards(documents),
    )


def _joined_tokens(documents: Sequence[Document]) -> tuple[Array, Array]:
    """The tokens of all documents, [T] int64, and each one's number of tokens, [N] int64."""
    pieces = []
    for number, document in enumerate(documents):
        tokens = as_array(number, "tokens", document.tokens)
        if len(tokens) == 0:
            raise DocumentError(number, "tokens", "must hold at least one token, got none")
        if tokens.dtype.kind not in "iu":
            raise DocumentError(number, "tokens", f"must be integers, got {_dtype_name(tokens)}")
        pieces.append(tokens.astype(np.int64, copy=False))  # an id above the range turns negative
    lengths = np.array([len(tokens) for tokens in pieces], dtype=np.int64)
    joined = np.concatenate([np.zeros(0, np.int64), *pieces])
    if joined.size and joined.min() < 0:
        number = int(np.searchsorted(np.cumsum(lengths), joined.argmin(), side="right"))
        position = int(pieces[number].argmin())
        got = documents[number].tokens[position]
        problem = f"must be ids from 0 to 2^63 - 1, got {got} at position {position}"
        raise DocumentError(number, "tokens", problem)
    return joined, lengths


def _mark_learned(number: int, document: Document, learned: Array) -> None:
    """Writes which tokens of a document are to be learned into its slice of the pack."""
    if (document.prompt_length is None) == (document.loss_mask is None):
        given = "neither" if document.prompt_length is None else "both"
        problem = f"or `loss_mask` is required, exactly one of them, got {given}"
        raise DocumentError(number, "prompt_length", problem)
    if document.prompt_length is not None:
        length = document.prompt_length
        if not _is_integer(length) or not 0 <= length <= len(learned):
            problem = f"must be an integer from 0 to {len(learned)} (the tokens), got {length!r}"
            raise DocumentError(number, "prompt_length", problem)
        learned[length:] = True
        return
    assert document.loss_mask is not None
    mask = as_array(number, "loss_mask", document.loss_mask)
    if len(mask) != len(learned):
        problem = f"must have {len(learned)} values, one a token, got {len(mask)}"
        raise DocumentError(number, "loss_mask", problem)
    if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        problem = f"must be booleans, or integers 0 and 1, got {_dtype_name(mask)}"
        raise DocumentError(number, "loss_mask", problem)
    learned[:] = mask


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
        for field in _LOGPROB_FIELDS:
            if getattr(document, field) is not None:
                problem = (
                    f"must be taken at the temperature {document.temperature} of the document, got "
                    f"values at {document.logprobs_temperature}, which cannot be converted; let "
                    "the sampler report them after temperature, or compute them again"
                )
                raise DocumentError(number, field, problem)
    version = document.model_version
    if version is not None and (not _is_integer(version) or version < 0):
        problem = f"must be an integer of at least 0, got {version!r}"
        raise DocumentError(number, "model_version", problem)
    reward = document.reward
    if reward is not None and not (is_finite(reward) or (_is_real(reward) and reward != reward)):
        problem = f"must be a finite number, or None for unscored, got {reward!r}"
        raise DocumentError(number, "reward", problem)


def _carried_columns(
    documents: Sequence[Document], label_counts: Array, columns: Collection[str] | None
) -> list[str]:
    """Names of the columns of the batch; refuses a labelled document that lacks one."""
    if columns is not None and (unknown := sorted(set(columns) - set(COLUMNS))):
        raise ValueError(f"`columns` must be names out of {list(COLUMNS)}, got {unknown}")
    carried = []
    for name in COLUMNS:
        field = TOKEN_COLUMNS.get(name, name)
        present = [getattr(document, field) is not None for document in documents]
        if name not in columns if columns is not None else not any(present):
            continue
        for number, is_present in enumerate(present):
            if not is_present and label_counts[number] > 0:
                reason = (
                    f"document {present.index(True)} has it"
                    if columns is None
                    else f"the batch must carry `{name}`"
                )
                raise DocumentError(number, field, f"is required, as {reason}, got none")
        carried.append(name)
    return carried


def _shifted_column(
    documents: Sequence[Document], field: str, starts: Array, ends: Array, labelled: Array
) -> Array:
    """A per-token field of all documents as [T] fp32 in label alignment, 0 without label."""
    by_token = np.zeros(len(labelled), dtype=np.float32)
    with np.errstate(over="ignore"):  # what overflows fp32 is refused as infinite below
        for number, document in enumerate(documents):
            _fill_values(number, document, field, by_token[starts[number] : ends[number]])
    column = np.zeros_like(by_token)
    column[:-1] = np.where(labelled[:-1], by_token[1:], 0)
    bad = np.flatnonzero(~np.isfinite(column))
    if bad.size:
        number = int(np.searchsorted(ends, bad[0], side="right"))
        position = bad[0] + 1 - starts[number]
        problem = f"must be finite fp32 at every label, got {column[bad[0]]} for token {position}"
        raise DocumentError(number, field, problem)
    return column


def _fill_values(number: int, document: Document, field: str, by_token: Array) -> None:
    """Writes a field's values into the document's slice; all layouts end at the last token."""
    values = getattr(document, field)
    if values is None:
        return
    if field == "advantage" and (_is_real(values) or np.ndim(values) == 0):
        if not is_finite(values := _scalar(values)):
            raise DocumentError(number, field, f"must be a finite number, got {values!r}")
        by_token[:] = values
        return
    array = as_array(number, field, values)
    if array.dtype.kind not in "fiu":
        raise DocumentError(number, field, f"must be numbers, got {_dtype_name(array)}")
    length = len(by_token)
    allowed = {length: "token"} if document.alignment == "token" else {length - 1: "label"}
    if document.prompt_length is not None:
        allowed.setdefault(length - document.prompt_length, "completion token")
    if len(array) not in allowed:
        choices = " or ".join(f"{count} (one a {what})" for count, what in allowed.items())
        problem = f"must have {choices} values, got {len(array)}; none are padded or cut"
        raise DocumentError(number, field, problem)
    by_token[length - len(array) :] = array


def _model_versions(documents: Sequence[Document]) -> Array:
    versions = [document.model_version for document in documents]
    return np.array([-1 if version is None else version for version in versions], dtype=np.int64)


def _rewards(documents: Sequence[Document]) -> Array | None:
    rewards = [document.reward for document in documents]
    if all(reward is None for reward in rewards):
        return None
    return np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float32)


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


def _scalar(value: Any) -> Any:
    """The Python number of a zero-dimensional array or tensor; other values as they are."""
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _dtype_name(array: Array) -> str:
    return "other values" if array.dtype.kind in "OUS" else str(array.dtype)


def _is_integer(value: object) -> bool:
    # The plain type first: the check of an abstract class costs ten times as much.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_finite(value: Any) -> bool:
    """Whether a value is a real number (no boolean) within the range of a float."""
    return _is_real(value) and abs(value) <= float_info.max


def _is_real(value: object) -> bool:
    return type(value) in (float, int) or (isinstance(value, Real) and not isinstance(value, bool))
