"""Batches of draft heads, which predict tokens further on than the next one."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastrl.data.batch import TokenBatch
from fastrl.data.documents import IGNORE_LABEL
from fastrl.data.label_shift import further_slots


def draft_batch(batch: TokenBatch, depth: int) -> TokenBatch:
    """The batch of the draft head of a depth: slot t belongs to the label of slot t + depth.

        labels'[t] = labels[t + depth] inside the same document, else -100
        tokens'[t] = tokens[t + depth] inside the same document, else 0

    Made of the whole packed sequence: slices of it, their counts and row sets are exact, also where
    slot t + depth lies on another rank. A slot of a prompt may have a label. `tokens'` are what a
    module of depth k embeds beside the hidden states of depth k - 1. Columns move with their
    labels; recorded entries are left out, as draft heads are over the whole vocabulary.

    Args:
        batch: of the head itself.
        depth: k, at least 1.

    Raises:
        ValueError: a depth below 1, labels that were drawn at random for another depth, or
            documents that share slots: a shared slot would have the label of one of them only.
    """
    if depth < 1:
        raise ValueError(f"`depth` must be at least 1, got {depth}")
    if batch.visible_until is not None:
        raise ValueError(
            "`share_prefixes` must not be given with draft heads, whose labels at a shared slot"
            " differ among its documents; pack without."
        )
    if batch.draw_weights is not None:
        raise ValueError(
            "`draw_weights` must not be in a batch that draft heads are made of, whose labels are"
            " others; use `with_sampled_tokens` on the batch of each depth."
        )
    slots, inside = further_slots(batch.document_index, depth)
    labels = torch.where(inside, batch.labels[slots], IGNORE_LABEL)
    labelled = batch.document_index[labels != IGNORE_LABEL]
    return replace(
        batch,
        tokens=torch.where(inside, batch.tokens[slots], 0),
        labels=labels,
        columns={name: each[slots] for name, each in batch.columns.items()},
        document_label_counts=torch.bincount(labelled, minlength=batch.num_documents),
        kept_tokens=None,
        teacher_tokens=None,
        target_slots=slots,
    )
