"""A batch on its way to a GPU."""

from __future__ import annotations

import pytest
import torch

from fastrl.data.batch import BatchCounts, TokenBatch
from fastrl.data.documents import Document

pytestmark = pytest.mark.gpu


def test_counts_that_are_on_the_gpu_already_stay_there() -> None:
    """As after the all-reduce over data ranks."""
    document = Document(tokens=[1, 2, 3, 4], prompt_length=2, logprobs=[-1.0] * 2, advantage=0.5)
    labels, documents = (torch.tensor(number, device="cuda") for number in (20, 8))
    (batch,) = TokenBatch.from_documents([document]).to_kwargs(
        counts=BatchCounts(labels, documents), device="cuda"
    )
    assert batch.num_labels_in_batch is labels
    assert batch.labels.tolist() == [-100, 3, 4, -100]
