"""Forward and backward of a packed sequence in pieces, exact also for document-level losses.

Activation memory is that of one piece, and the keys and values of all. The cost is one more forward
of the backbone, as under full activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.layers.language_model_head import HeadOutput
from fastrl.models.llama import Llama
from fastrl.models.split_attention import Pieces
from fastrl.parallel import group_size


def backward_in_pieces(
    llama: Llama,
    pieces: Sequence[BatchKwargs],
    joined: BatchKwargs,
    *,
    reshards: bool = True,
) -> HeadOutput:
    """The head's output for a packed sequence, with the gradients of its loss left in `llama`.

    1. Each piece forward without a graph; keys and values are kept.
    2. The head once, forward and backward, over the hidden states of all pieces.
    3. Each piece forward again, with a graph, and backward, the last one first: from the gradient
       of its hidden states and from those that later pieces left in its keys and values.

    Args:
        llama: the model, in training mode.
        pieces: of `TokenBatch.to_kwargs(micro_sequences=n)`, in order.
        joined: the same with `join=True`: all pieces as one batch.
        reshards: whether FSDP2 frees embedding, norm and head after the last backward.

    Returns:
        The output of step 2, its loss without a graph.
    """
    llama.check_length(joined.max_document_length)
    run = Pieces()
    with torch.no_grad():
        hidden = []
        for piece in pieces:
            hidden.append(_hidden_states(llama, piece, run))
            run.keep()
    leaf = torch.cat(hidden).requires_grad_()
    _stay_gathered(llama, True)
    output = llama.head_output(leaf, _as_gathered(llama, pieces, joined))
    assert output.loss is not None
    output.loss.backward()
    assert leaf.grad is not None
    grads = leaf.grad.split([part.shape[0] for part in hidden])
    for index in reversed(range(len(pieces))):
        _stay_gathered(llama, index > 0 or not reshards)
        before = run.before(index)
        states = _hidden_states(llama, pieces[index], before)
        key_values = [before.current[layer] for layer in sorted(before.current)]
        # No later piece reads the keys and values of the last one, so they have no gradient.
        ends = [(states, grads[index])] + [
            (key_value, kept.grad)
            for key_value, kept in zip(key_values, run.key_values[index], strict=True)
            if kept.grad is not None
        ]
        torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])
        run.key_values[index].clear()
    return replace(output, loss=output.loss.detach())


def _stay_gathered(llama: Llama, stay: bool) -> None:
    """Whether embedding, norm and head stay gathered after a backward: one all-gather for all."""
    if isinstance(llama, FSDPModule):
        llama.set_reshard_after_backward(not stay, recurse=False)


def _hidden_states(llama: Llama, piece: BatchKwargs, run: Pieces) -> Tensor:
    vectors = (piece.tokens, piece.positions, piece.document_index)
    return llama.hidden_states(*vectors, run, visible_until=piece.visible_until)


def _as_gathered(llama: Llama, pieces: Sequence[BatchKwargs], joined: BatchKwargs) -> BatchKwargs:
    """The joined batch in the order of the hidden states that sequence parallelism gathers.

    Each rank's hidden states are its slices of all pieces: rank after rank, piece after piece.
    """
    size = group_size(llama.groups.sp)
    if size == 1 or len(pieces) == 1:
        return joined
    slots = torch.arange(joined.num_tokens).view(len(pieces), size, -1)
    order = slots.transpose(0, 1).flatten()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    sets: dict[str, Any] = {name: _moved(rows, place) for name, rows in joined.row_sets.items()}
    device = joined.labels.device
    # A document's rows are no longer adjacent, so no chunk of rows holds whole documents.
    return replace(joined.select(order.to(device)), whole_documents=False, **sets)


def _moved(rows: RowSet, place: Tensor) -> RowSet:
    """The rows at their new places, found on the host."""
    host_index = place[rows.host_index].sort().values
    return RowSet(
        index=host_index.to(rows.index.device, non_blocking=True),
        document_ends=(len(rows),) if len(rows) else (),
        host_index=host_index,
    )
