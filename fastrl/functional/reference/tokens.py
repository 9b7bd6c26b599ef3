"""The step's tokens of the definition of the losses, and how their values become one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.functional.reference.head import documents

Options = Mapping[str, Any]

BOUND = 20.0  # log-ratios saturate here


@dataclass(frozen=True)
class Tokens:
    """The step's tokens in label alignment; every vector is [T], those not needed may be None."""

    labels: Tensor
    document_index: Tensor
    logprobs: Tensor
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    mean_logit: Tensor | None = None
    divergence: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    group_index: Tensor | None = None
    model_version: Tensor | None = None
    draw_weights: Tensor | None = None  # 0 where a label was not drawn; it still counts
    current_version: int = 0
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    distill_weights: Tensor | None = None
    weights: Tensor | None = None


def of_stream(tokens: Tokens, stream: str) -> Tokens:
    """The tokens of a stream: no label where the weight is 0, and the weights of the others."""
    weights = getattr(tokens, f"{stream}_weights")
    labels = tokens.labels.clone()
    for t in range(len(labels)):
        if weights[t] == 0:
            labels[t] = -100
    return replace(tokens, labels=labels, weights=weights)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio that saturates."""
    return torch.exp(torch.clamp(log_ratio, -BOUND, BOUND))


def normalise(values: Mapping[int, Tensor], tokens: Tokens, options: Options) -> Tensor:
    """The loss of values by labelled slot."""
    by_document = list(documents(tokens.document_index, tokens.labels))
    groups: dict[int, list[int]] = {}
    for slots in by_document:
        for t in slots:
            if tokens.group_index is not None:
                groups.setdefault(int(tokens.group_index[t]), []).append(t)
    total = tokens.logprobs.new_zeros(())
    for slots in by_document:
        for t in slots:
            if options["normalisation"] == "tokens":
                divisor = sum(len(other) for other in by_document)
            elif options["normalisation"] == "documents":
                divisor = len(slots) * len(by_document)
            elif options["normalisation"] == "groups":
                assert tokens.group_index is not None
                divisor = len(groups[int(tokens.group_index[t])]) * len(groups)
            else:
                divisor = len(by_document) * options["length"]
            total = total + weight_of(tokens, t) * values[t] / divisor
    return total


def weight_of(tokens: Tokens, t: int) -> float:
    """The weight of what token t adds to a sum: that of its stream, and of its draw."""
    weight = 1.0 if tokens.weights is None else tokens.weights[t].item()
    return weight if tokens.draw_weights is None else weight * tokens.draw_weights[t].item()
