"""Strategies: documents in every form, and what they say in token alignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from fastrl import Document

VOCAB_SIZE = 50
NAMES = ("logprobs", "ref_logprobs", "rollout_logprobs")
FP32 = st.floats(-8, 0, width=32)


@dataclass(frozen=True)
class Facts:
    """What a document says, value i for token i; those of tokens without label mean nothing."""

    tokens: list[int]
    is_label: list[bool]
    columns: dict[str, list[float]]
    advantage: list[float]
    document: Document


def _array(values: list[float]) -> Any:
    return np.asarray(values, np.float32)


def _tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@st.composite
def facts(draw: st.DrawFn, *, has_prompt: bool | None = None) -> Facts:
    """A document with all columns, in a random layout; `has_prompt` instead of a mask or either."""
    length = draw(st.integers(1, 9))
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=length, max_size=length))
    with_prompt = draw(st.booleans()) if has_prompt is None else has_prompt
    prompt = draw(st.integers(0, length)) if with_prompt else None
    mask = None if with_prompt else draw(st.lists(st.booleans(), min_size=length, max_size=length))
    if prompt is not None:
        is_label = [i >= max(prompt, 1) for i in range(length)]
    else:
        assert mask is not None
        is_label = [i > 0 and bool(mask[i]) for i in range(length)]
    layout = draw(st.sampled_from(["token", "label"] + ["completion"] * with_prompt))
    start = {"token": 0, "label": 1, "completion": prompt or 0}[layout]
    values = st.lists(FP32, min_size=length, max_size=length)
    columns = {name: draw(values) for name in NAMES}
    per_token = draw(st.booleans())
    advantage = draw(values) if per_token else [draw(FP32)] * length
    wrap: Any = draw(st.sampled_from([list, _array, _tensor]))

    def wrapped(column: list[float]) -> Any:
        return wrap(column[start:])

    document = Document(
        tokens=tokens,
        prompt_length=prompt,
        loss_mask=mask,
        advantage=wrapped(advantage) if per_token else advantage[0],
        temperature=draw(st.sampled_from([0.5, 1.0, 1.5])),
        model_version=draw(st.integers(0, 5)),
        reward=draw(st.sampled_from([0.0, 0.5, 1.0])),
        group_id=draw(st.integers(0, 2)),
        alignment="label" if layout == "label" else "token",
        **{name: wrapped(column) for name, column in columns.items()},
    )
    return Facts(tokens, is_label, columns, advantage, document)


def many(min_size: int = 0, max_size: int = 6, **options: Any) -> st.SearchStrategy[list[Facts]]:
    """Some documents."""
    return st.lists(facts(**options), min_size=min_size, max_size=max_size)


def labelled(values: list[float], some: Facts) -> list[float]:
    """The values of the tokens that are labels."""
    return [value for value, is_label in zip(values, some.is_label, strict=True) if is_label]
