"""Per-document sums of packed per-token values, exact under any split of a document."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.parallel import all_reduce_sum


def document_sums(
    values: Tensor,  # [R] or [R, K]
    document_index: Tensor,  # [R]
    num_documents: int,
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:  # [num_documents + 1] or [num_documents + 1, K]
    """Sums of `values` over the tokens of each document: an index-add, then one all-reduce.

    Differentiable on every rank; in float64 where the device has it. The last entry is padding's,
    so that `sums[document_index]` gives each token its document's sum.

    Args:
        values: per token; exactly 0 where a token must not count.
        document_index: int64, global index of the token's document; -1 is padding.
        num_documents: documents in the whole packed sequence, the same on every rank.
        groups: the groups over which documents are split (sequence-data; sequence, if it splits
            tokens).
    """
    # In float64 the order of a GPU's atomic additions does not affect the fp32 result.
    dtype = values.dtype if values.device.type == "mps" else torch.float64
    sums = torch.zeros(num_documents + 1, *values.shape[1:], dtype=dtype, device=values.device)
    slots = torch.where(document_index < 0, num_documents, document_index)
    return all_reduce_sum(sums.index_add(0, slots, values.to(dtype)), groups)
