"""Pairs of documents for DPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastrl.data.documents import Document


def preference_pairs(pairs: Sequence[tuple[Document, Document]]) -> list[Document]:
    """The documents of (chosen, rejected) pairs as the loss `dpo` takes them.

    A pair gets a `group_id` of its own, and advantages of 1 (chosen) and -1 (rejected), which name
    the sides. Both documents of a pair must go into the same `TokenBatch`.

    Args:
        pairs: documents with `ref_logprobs`; whatever group and advantage they have is replaced.
    """
    documents = []
    for number, (chosen, rejected) in enumerate(pairs):
        for document, sign in ((chosen, 1.0), (rejected, -1.0)):
            documents.append(replace(document, group_id=f"pair {number}", advantage=sign))
    return documents
