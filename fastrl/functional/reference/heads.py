"""The definition of what stands beside the head: values, advantages from them, draft labels.

Plain loops, as `losses.py`, which normalises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastrl.functional.reference.tokens import Options, Tokens, normalise


def value_loss(
    values: Tensor,  # [T]
    old_values: Tensor,  # [T]
    returns: Tensor,  # [T]
    tokens: Tokens,
    options: Options,
) -> Tensor:
    """0.5 (v - R)^2, or that of the value clipped around the old one where it is larger."""
    of_slots = {}
    for t, label in enumerate(tokens.labels.tolist()):
        if label == -100:
            continue
        error = (values[t] - returns[t]) ** 2
        if options["epsilon"] is not None:
            low, high = old_values[t] - options["epsilon"], old_values[t] + options["epsilon"]
            clipped = values[t]
            if clipped > high:
                clipped = high
            elif clipped < low:
                clipped = low
            clipped_error = (clipped - returns[t]) ** 2
            if clipped_error > error:
                error = clipped_error
        of_slots[t] = 0.5 * error
    return normalise(of_slots, tokens, options)


def advantages(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> list[float]:
    """sum_l (gamma lam)^l delta_{t+l}, delta = r_t + gamma V_{t+1} - V_t (arXiv:1506.02438)."""
    count = len(values)
    deltas = []
    for t in range(count):
        following = values[t + 1] if t + 1 < count else 0.0
        deltas.append(rewards[t] + gamma * following - values[t])
    found = []
    for t in range(count):
        total = 0.0
        for later in range(t, count):
            total += (gamma * lam) ** (later - t) * deltas[later]
        found.append(total)
    return found


def draft_labels(labels: Tensor, document_index: Tensor, depth: int) -> Tensor:  # [T], [T]
    """The label `depth` slots further on in the same document, else -100."""
    found = []
    for t in range(len(labels)):
        later = t + depth
        is_inside = later < len(labels) and document_index[later] == document_index[t]
        found.append(int(labels[later]) if is_inside else -100)
    return torch.tensor(found)
