"""Documents from padded [B, L] tensors, and values of documents back into such tensors.

A row holds one document: the tokens that `attention_mask` attends to, in order. Padding on either
side and holes in between are not part of it. The document is what the model gets, so

- positions count its tokens from 0: `attention_mask.cumsum(-1) - 1`, which `generate` of
  transformers takes for padded rows. A forward that counts columns instead gives rows with padding
  on the left the same log-probabilities under relative positions alone, and rows with holes others;
- the token behind a hole is predicted from the last one before it. `logits[:, :-1]` of the padded
  model has the prediction of the hole there.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fastrl.data.columns import BATCH_COLUMNS, LOGPROBS, WEIGHTS
from fastrl.data.documents import Array, Document

Padded: TypeAlias = Tensor | Array

_BY_TOKEN = (*LOGPROBS, "advantage", "values", "returns", *WEIGHTS)
_BY_ROW = (
    *("advantage", *WEIGHTS, "temperature", "reward", "group_id", "model_version"),
    "logprobs_temperature",
)


def documents_from_padded(
    tokens: Padded,  # [B, L]
    attention_mask: Padded,  # [B, L]
    loss_mask: Padded,  # [B, L], [B, L - 1] or [B, C]
    **fields: Padded | Sequence[Any] | float | str | None,
) -> list[Document]:
    """The document of each row that attends to a token, in the order of the rows.

    A row of padding alone gives no document. Values of fewer than L columns belong to the last
    ones: [B, L - 1] has one a label (of `logits[:, :-1]`), [B, C] one a completion token of rows
    that end with C columns for completions, as TRL makes them. Work grows with rows in Python and
    with tokens in numpy; tensors on a device are copied to the host.

    Args:
        tokens: integers.
        attention_mask: 1 (or True) where a token is part of the row's document.
        loss_mask: 1 (or True) where a token is to be learned: a completion mask, or
            `labels != -100`; 0 where `attention_mask` is. Tokens in front of its columns are not
            learned. The first token of a document never is.
        fields: of `Document`, by name. `logprobs`, `ref_logprobs`, `rollout_logprobs`, `advantage`,
            `values`, `returns` and weights of streams: [B, L], [B, L - 1], or as many columns as
            `loss_mask`, any value where no token is learned. `advantage`, weights, `temperature`,
            `reward`, `group_id`, `model_version` and `logprobs_temperature`: [B], or one value for
            all rows. None is as not given.

    Returns:
        At most B documents with `loss_mask` in token alignment. float64 stays float64.

    Raises:
        TypeError: what is no tensor or array, or a name that is no field.
        ValueError: a shape or a value that does not fit, by name.
    """
    ids, learned = _matrix("tokens", tokens), _matrix("loss_mask", loss_mask)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"`tokens` must be integers, got {ids.dtype}")
    length = ids.shape[1]
    widths = list(dict.fromkeys((length, max(length - 1, 0), learned.shape[1])))
    attended = _mask("attention_mask", _matrix("attention_mask", attention_mask))
    attended = _last_columns("attention_mask", attended, ids.shape, [length])
    learned = _last_columns("loss_mask", _mask("loss_mask", learned), ids.shape, range(length + 1))
    _check_attended(learned, attended)
    lengths = attended.sum(1)
    rows = np.flatnonzero(lengths)
    ends = lengths[rows].cumsum()[:-1]
    columns: dict[str, Sequence[Any]] = {"tokens": np.split(ids[attended], ends)}
    columns["loss_mask"] = np.split(learned[attended], ends)
    for name, value in fields.items():
        if value is None:
            continue
        if _is_by_token(name, value):
            whole = _last_columns(name, _matrix(name, value), ids.shape, widths)
            columns[name] = np.split(whole[attended], ends)
        else:
            by_row = _by_row(name, value, len(ids))
            columns[name] = [by_row[row] for row in rows]
    return [
        Document(**{name: values[number] for name, values in columns.items()})
        for number in range(len(rows))
    ]


def padded_from_documents(
    values: Sequence[Tensor],  # [n - 1] each
    attention_mask: Padded,  # [B, L]
    fill: float = 0.0,
) -> Tensor:  # [B, L]
    """Label-aligned values of the documents of padded rows, at the tokens that they belong to.

    Column j of a row is the value of token j, as `logprobs` of `documents_from_padded` have it;
    the first token of a document has none. [:, 1:] has one a label, [:, -C:] one a completion
    token. Differentiable; on the device and in the dtype of the values.

    Args:
        values: of `TokenBatch.split_by_document` or `OptimizerStep.split_by_document`, in the order
            of the documents of `documents_from_padded`.
        attention_mask: the same as there.
        fill: at padding, holes and first tokens. (At tokens that are not to be learned the head
            gives 0.)

    Raises:
        ValueError: values that are not those of the rows.
    """
    attended = _mask("attention_mask", _matrix("attention_mask", attention_mask))
    expected = [int(n) - 1 for n in attended.sum(1) if n]
    given = [len(piece) for piece in values]
    if given != expected:
        raise ValueError(
            f"`values` must have {_shown(expected)} values (one a label) for the"
            f" {len(expected)} rows with tokens, got {_shown(given)}"
        )
    is_first = attended & (attended.cumsum(1) == 1)
    index = torch.from_numpy(np.flatnonzero(attended & ~is_first))
    if not given:
        return torch.full(attended.shape, fill)
    flat = torch.cat(list(values))
    padded = flat.new_full((attended.size,), fill)
    return padded.index_put((index.to(flat.device),), flat).view(attended.shape)


def _shown(numbers: Sequence[int]) -> str:
    """Some of the numbers."""
    return f"{numbers}" if len(numbers) <= 8 else f"{numbers[:8]}...".replace("]...", ", ...]")


def _host(value: Padded) -> Array:
    """The values as an array."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return value


def _matrix(name: str, value: Any) -> Array:  # [B, W]
    """The values of a tensor or array of two dimensions."""
    if not isinstance(value, Tensor | np.ndarray):
        got = type(value).__name__
        raise TypeError(f"`{name}` must be a tensor or array of two dimensions, got a {got}")
    if value.ndim != 2:
        raise ValueError(f"`{name}` must have two dimensions, [B, L], got {list(value.shape)}")
    return _host(value)


def _mask(name: str, matrix: Array) -> Array:  # [B, W]
    """Booleans of 0 and 1."""
    if not ((matrix == 0) | (matrix == 1)).all():
        raise ValueError(f"`{name}` must be booleans, or 0 and 1, got other values")
    return matrix.astype(np.bool_)


def _last_columns(
    name: str, matrix: Array, shape: tuple[int, ...], widths: Sequence[int]
) -> Array:  # [B, L]
    """The values in the last columns of [B, L], 0 before them."""
    rows, length = shape
    width = matrix.shape[1]
    if matrix.shape[0] != rows or width not in widths:
        few = len(widths) <= 3
        choices = [str([rows, each]) for each in widths] if few else [f"[{rows}, at most {length}]"]
        raise ValueError(
            f"`{name}` must be of shape {' or '.join(choices)} beside `tokens` of {[rows, length]},"
            f" got {list(matrix.shape)}; values of fewer columns belong to the last ones"
        )
    if width == length:
        return matrix
    whole = np.zeros(shape, matrix.dtype)
    whole[:, length - width :] = matrix
    return whole


def _check_attended(learned: Array, attended: Array) -> None:
    wrong = learned & ~attended
    if wrong.any():
        row, column = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"`loss_mask` must be 0 where `attention_mask` is, got {int(wrong.sum())} tokens of"
            f" which the first is in row {row}, column {column}; multiply the two"
        )


def _is_by_token(name: str, value: Any) -> bool:
    """Whether a field has a value a token; refuses names that are no fields."""
    if name not in _BY_TOKEN and name not in _BY_ROW:
        field = BATCH_COLUMNS.get(name)
        remedy = f"; the field of `{name}` is `{field}`" if field else ""
        names = list(dict.fromkeys((*_BY_TOKEN, *_BY_ROW)))
        raise TypeError(f"`fields` must be out of {names}, got `{name}`{remedy}")
    return name not in _BY_ROW or (name in _BY_TOKEN and getattr(value, "ndim", 0) > 1)


def _by_row(name: str, value: Any, num_rows: int) -> list[Any]:
    """A value for each row."""
    if isinstance(value, str | Real):
        return [value] * num_rows
    if not isinstance(value, Tensor | np.ndarray | Sequence):
        got = type(value).__name__
        raise TypeError(f"`{name}` must have one value a row ([{num_rows}]), got a {got}")
    values = value if isinstance(value, Sequence) else _host(value)
    if isinstance(values, np.ndarray) and values.ndim == 0:
        values = np.broadcast_to(values, (num_rows,))
    shape = list(values.shape) if isinstance(values, np.ndarray) else [len(values)]
    if shape != [num_rows]:
        raise ValueError(f"`{name}` must have one value a row ([{num_rows}]), got {shape}")
    if isinstance(values, Sequence):
        return list(values)
    if name == "advantage" and values.dtype == np.float64:
        # Arrays without dimensions stay float64 in a batch, which Python numbers do not.
        return [values[row, ...] for row in range(num_rows)]
    return list(values.tolist())
