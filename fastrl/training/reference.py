"""The reference policy's log-probabilities of documents, before these are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from fastrl.config.training import ParallelConfig
from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document
from fastrl.data.partition import micro_batches_of_rank
from fastrl.data.step import OptimizerStep
from fastrl.parallel import all_reduce_tensors, group_rank, group_size
from fastrl.training.model import FrozenPolicy, TrainedModel


def with_ref_logprobs(
    documents: Sequence[Document],
    reference: FrozenPolicy,
    model: TrainedModel,
    parallel: ParallelConfig,
    max_tokens: int,
    device: torch.device,
) -> list[Document]:
    """Documents with the log-probabilities of the reference policy, on all ranks.

    Each rank computes those of its share, and one all-reduce an axis adds them up. Its result is
    waited for, as advantages are made on the host.

    Args:
        documents: of the whole step, the same on all ranks, in token alignment.
        reference: whose log-probabilities.
        model: that is trained, whose process groups the reference has.
        parallel: how a packed sequence is cut.
        max_tokens: of a micro-batch.
        device: of the reference.
    """
    # The id says which document a pack has, on whose copies nothing else depends.
    numbered = [replace(document, rollout_id=n) for n, document in enumerate(documents)]
    groups = model.groups
    packs = micro_batches_of_rank(
        numbered, group_rank(groups.dp), group_size(groups.dp), max_tokens
    )
    step = OptimizerStep(
        [TokenBatch.from_documents(pack) for pack in packs],
        groups,
        device=device,
        layout=parallel.sequence_layout,
    )
    lengths = [len(document.tokens) for document in documents]
    starts = list(accumulate(lengths, initial=0))
    values = torch.zeros(starts[-1] + 1, dtype=torch.float64, device=device)
    for pack, batch in zip(packs, step.batches, strict=True):
        (whole,) = step.to_kwargs(batch, parallel.micro_sequences, join=True)
        first = torch.tensor([starts[int(doc.rollout_id or 0)] for doc in pack], device=device)
        places = first[whole.document_index.clamp(min=0)] + whole.positions + 1
        is_label = whole.labels != -100
        logprobs = torch.where(is_label, reference.logprobs(whole), 0).to(values.dtype)
        # Of the additions to a place all but one, that of its label, are of 0.
        values.index_add_(0, torch.where(is_label, places, 0), logprobs)
    for group in model.head.loss_groups:
        all_reduce_tensors([values], group)
    by_document = values[:-1].cpu().split(lengths)
    return [
        replace(document, ref_logprobs=each.tolist())
        for document, each in zip(documents, by_document, strict=True)
    ]
