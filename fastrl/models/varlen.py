"""Attention of whole documents of any lengths by FlashAttention's kernels, without a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.config.model import AttentionImplementation
from fastrl.models import flash4
from fastrl.models.attend import DocumentLengths


def varlen_refusal(
    implementation: AttentionImplementation, device: torch.device, dtype: torch.dtype
) -> str | None:
    """What `varlen` or `flash4` needs and is not met here; None if it runs."""
    if device.type != "cuda":
        return f"needs a CUDA device, got {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return (
            f"needs 16-bit activations, got {name}; give `parallel.compute_dtype: bfloat16` (and"
            " `parallel.fully_sharded: true`)"
        )
    if implementation == "flash4":
        return flash4.refusal(device)
    return None


def check_varlen(
    implementation: AttentionImplementation, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuses `varlen` or `flash4` where it does not run."""
    refusal = varlen_refusal(implementation, device, dtype)
    if refusal is not None:
        raise ValueError(f"`attention_implementation: {implementation}` {refusal}; or use `auto`")


def document_starts(
    document_index: Tensor,  # [T]
    lengths: DocumentLengths | None,
) -> tuple[Tensor, int]:
    """Int32 first row of each document and of each stretch of padding, and T; the longest's rows.

    Padding is documents that no one reads.
    """
    num_tokens, device = len(document_index), document_index.device
    if lengths is None:
        lengths = DocumentLengths(int(document_index.max()) + 1, num_tokens)
    number, longest = lengths.number, max(lengths.longest, 1)
    index = torch.where(document_index < 0, number, document_index)
    begins = torch.searchsorted(index, torch.arange(number + 1, device=device))
    # As many stretches as all rows would take: their number is not known on the host.
    stretches = torch.arange(1, -(-num_tokens // longest) + 1, device=device) * longest
    padding = (begins[-1] + stretches).clamp(max=num_tokens)
    return torch.cat([begins, padding]).to(torch.int32), longest
