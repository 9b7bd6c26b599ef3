"""A packed batch as the input of a Hugging Face model, and hidden states back as packed."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.models.prefix_attention import prefix_block_mask

Layout = Literal["packed", "padded"]
Packing = Literal["auto", "packed", "padded"]


def model_inputs(batch: BatchKwargs, layout: Layout) -> dict[str, Any]:
    """The keyword arguments of the model: the batch in one row, or a row for each document.

    A batch without documents, as ranks with fewer have, is padded to a row of one token.

    Args:
        batch: T tokens of N whole documents.
        layout: `packed`: `input_ids` and `position_ids` [1, T], and where documents share prefixes
            FlexAttention's mask. `padded`: `input_ids` and `attention_mask` [N, L], padded on the
            right, L tokens in the longest document.

    Raises:
        ValueError: the batch does not say how long its longest document is.
    """
    if layout == "packed":
        inputs = {"input_ids": batch.tokens[None], "position_ids": batch.positions[None]}
        if batch.visible_until is None:
            return inputs
        return {**inputs, "attention_mask": prefix_block_mask(batch.visible_until)}
    if batch.num_documents == 0:
        one = batch.tokens.new_ones(1, 1)
        return {"input_ids": one, "attention_mask": one}
    slots, rows = _slots(batch), (batch.num_documents, _length(batch))
    # One slot more, for the padding of the packed sequence.
    ids = batch.tokens.new_zeros(rows[0] * rows[1] + 1)
    mask = torch.zeros_like(ids).index_fill(0, slots, 1)
    ids = ids.index_copy(0, slots, batch.tokens)
    return {"input_ids": ids[:-1].view(rows), "attention_mask": mask[:-1].view(rows)}


def packed_hidden_states(
    hidden_states: Tensor,  # [1, T, D] or [N, L, D]
    batch: BatchKwargs,
    layout: Layout,
) -> Tensor:
    """[T, D] hidden states of the batch's tokens; at the batch's padding they mean nothing."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    if layout == "packed":
        return flat
    return flat.index_select(0, _slots(batch).clamp(max=flat.shape[0] - 1))


def _slots(batch: BatchKwargs) -> Tensor:
    """[T] slot of each token among N L; N L at padding. Nothing here waits for the device."""
    length = _length(batch)
    slots = batch.document_index * length + batch.positions
    return slots.where(batch.document_index >= 0, batch.num_documents * length)


def _length(batch: BatchKwargs) -> int:
    if batch.max_document_length is None:
        raise ValueError(
            "`max_document_length` of the batch must be known where documents are padded, got None;"
            " `TokenBatch.to_kwargs` and `OptimizerStep` give it."
        )
    return batch.max_document_length
