"""The definition of every quantity of the head; that of the losses is in `losses.py`.

Logits are materialised, nothing is vectorised over tokens, and only torch is imported. Give it
float64. It is never changed to match a fast path; only tests and benchmarks import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def logits(
    hidden_states: Tensor,  # [T, D]
    weight: Tensor,  # [V, D]
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # scalar or [T]
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:  # [T, V]
    """z = cap(logit_scale (h W^T + b)) / temperature of the first `vocab_size` rows."""
    z = hidden_states @ weight.T
    if bias is not None:
        z = z + bias
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    z = z / temperature
    return z[:, :vocab_size]


def token_statistics(
    z: Tensor,  # [T, V]
    labels: Tensor,  # [T]
) -> tuple[Tensor, Tensor, Tensor]:
    """(z[label] - lse, lse - sum p z, lse = log sum exp z) [T]; 0 without label."""
    logprobs, entropies, logsumexps = [], [], []
    for row, label in zip(z, labels.tolist(), strict=True):
        if label == -100:
            zero = row.sum() * 0 if torch.isfinite(row).all() else row.new_zeros(())
            logprobs.append(zero)
            entropies.append(zero)
            logsumexps.append(zero)
            continue
        logsumexp = torch.logsumexp(row, 0)
        possible = row[row > -torch.inf]
        p = torch.exp(possible - logsumexp)
        logprobs.append(row[label] - logsumexp)
        entropies.append(logsumexp - (p * possible).sum())
        logsumexps.append(logsumexp)
    return torch.stack(logprobs), torch.stack(entropies), torch.stack(logsumexps)


def documents(
    document_index: Tensor,  # [T]
    labels: Tensor,  # [T]
) -> Iterator[list[int]]:
    """The labelled slots of each document that has any."""
    slots: dict[int, list[int]] = {}
    for slot, (document, label) in enumerate(
        zip(document_index.tolist(), labels.tolist(), strict=True)
    ):
        if document >= 0 and label != -100:
            slots.setdefault(document, []).append(slot)
    yield from slots.values()


def kept_entries(
    z: Tensor,  # [V]
    label: int,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    recorded: list[int] | None = None,
) -> list[int]:
    """The entries that a sampler keeps, in this order of filters, and the label.

    top_k: the k largest and those equal to the last of them. top_p: of the rest, renormalised, the
    fewest largest with a mass of at least top_p, and those equal to the last. min_p: those with
    p >= min_p max p.
    """
    if recorded is not None:
        return sorted({*recorded, label})
    entries = [v for v in range(len(z)) if z[v] > -torch.inf]
    values = z.tolist()
    if top_k is not None:
        last = sorted((values[v] for v in entries), reverse=True)[:top_k][-1]
        entries = [v for v in entries if values[v] >= last]
    if top_p is not None:
        p = torch.softmax(torch.tensor([values[v] for v in entries], dtype=torch.float64), 0)
        ordered = sorted(zip(p.tolist(), entries, strict=True), reverse=True)
        mass, last = 0.0, ordered[0][0]
        for probability, _ in ordered:
            if mass >= top_p:
                break
            mass, last = mass + probability, probability
        entries = sorted(v for probability, v in ordered if probability >= last)
    if min_p is not None:
        entries = [v for v in entries if values[v] >= max(values) + math.log(min_p)]
    return sorted({*entries, label})


def kept_statistics(
    z: Tensor,  # [V]
    label: int,
    entries: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, logsumexp) of the label under the softmax over some entries alone."""
    kept = torch.stack([z[v] for v in entries])
    logsumexp = torch.logsumexp(kept, 0)
    p = torch.exp(kept - logsumexp)
    return z[label] - logsumexp, logsumexp - (p * kept).sum(), logsumexp
