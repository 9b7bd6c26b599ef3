"""Every way to say which entries a sampler keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import BatchKwargs
from tests.helpers.loss_documents import VOCAB_SIZE

KEEP: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 4},
    "top_one": {"top_k": 1},
    "top_k_of_all": {"top_k": 100},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
    "recorded": {"recorded": True},
    "mixed": {"recorded": True},
}


def recorded_entries(keep: str, batch: BatchKwargs) -> Tensor:
    """[T, 6], of different numbers, some without the label; of every third document if mixed."""
    generator = torch.Generator().manual_seed(37)
    tokens = torch.randint(VOCAB_SIZE, (batch.num_tokens, 6), generator=generator)
    fillers = torch.randint(6, (batch.num_tokens, 1), generator=generator)
    if keep == "mixed":
        fillers = torch.where(batch.document_index[:, None] % 3 == 0, fillers, 6)
    return torch.where(torch.arange(6) < fillers, -1, tokens)
