"""What a correction holds to its bounds."""

from __future__ import annotations

import math

from torch import Tensor

from fastrl.config.corrections import CorrectionConfig
from fastrl.functional.kl import kl_estimate
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.policy_inputs import PolicyInputs
from fastrl.layers.losses.ratios import bounded_exp


def token_values(entry: CorrectionConfig, option: str, inputs: PolicyInputs) -> Tensor:  # [T]
    """What is summed over documents: l for a ratio, else the statistic; 0 without label.

    Raises:
        ValueError: the batch lacks a column, of which `option` has need.
    """
    policy = _logprobs(entry.policy, option, inputs)
    behaviour = _logprobs(entry.behaviour, option, inputs)
    if entry.statistic == "ratio":
        return at_labels(policy - behaviour, inputs.batch)
    if entry.statistic == "probability_difference":
        return (
            at_labels(policy, inputs.batch).exp() - at_labels(behaviour, inputs.batch).exp()
        ).abs()
    return kl_estimate(at_labels(behaviour - policy, inputs.batch), entry.statistic)


def _logprobs(policy: str, option: str, inputs: PolicyInputs) -> Tensor:  # [T]
    if policy == "current":
        return inputs.logprobs.detach()
    return inputs.column(f"{policy}_logprobs", option)


def statistic(values: Tensor, entry: CorrectionConfig) -> Tensor:  # [T]
    """The statistic of token values, or of their aggregates."""
    return bounded_exp(values) if entry.statistic == "ratio" else values


def bounds(entry: CorrectionConfig) -> tuple[float, float]:
    """Lower and upper bound."""
    low = -math.inf if entry.low is None else entry.low
    return low, math.inf if entry.high is None else entry.high


def within(values: Tensor, entry: CorrectionConfig) -> Tensor:  # [T]
    """Whether a statistic is within the bounds."""
    if entry.low is None:
        return values <= bounds(entry)[1]
    above = values >= entry.low
    return above if entry.high is None else above & (values <= entry.high)
