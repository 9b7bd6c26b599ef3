"""What the terms of a policy-gradient loss are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.config.loss_options import OnPolicyDistillationConfig, RatioLevel
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.base import required
from fastrl.layers.losses.masks import at_labels
from fastrl.layers.losses.on_policy_distillation import teacher_advantages


@dataclass(frozen=True)
class PolicyInputs:
    """Tokens, masked before any exponential: a mask after it would multiply infinities by 0.

    Attributes:
        loss: whose inputs they are; errors name it.
        statistics: of all slots, as the head gives them.
        batch: with the old policy's log-probabilities, the pass's own with `on_policy`.
        mask: [T], slots with a label.
        logprobs: [T], of the labels, 0 without.
        log_ratios: [T], logprob - old_logprob of each token; 0 for a loss without ratio.
        advantages: [T], of the tokens, 0 at slots without label.
    """

    loss: object
    statistics: TokenStatistics
    batch: BatchKwargs
    mask: Tensor
    logprobs: Tensor
    log_ratios: Tensor
    advantages: Tensor

    def column(self, name: str, option: str) -> Tensor:  # [T]
        """A column of the batch that an option of the loss needs, as it is.

        Raises:
            ValueError: the batch has none.
        """
        value: Tensor | None = getattr(self.batch, name)
        return required(value, name, self.loss, f" with `{option}`")


def policy_inputs(
    loss: object,
    ratio_level: RatioLevel,
    distillation: OnPolicyDistillationConfig | None,
    statistics: TokenStatistics,
    batch: BatchKwargs,
) -> PolicyInputs:
    """The inputs of a loss whose ratio is of `ratio_level`.

    The advantages are the batch's, and a teacher's with `distillation`.

    Raises:
        ValueError: the batch lacks a column that the loss needs.
    """
    mask = batch.labels != -100
    logprobs = at_labels(statistics.logprobs, batch)
    if distillation is None or distillation.rewards:
        advantages = required(batch.advantages, "advantages", loss)
    else:
        advantages = torch.zeros_like(logprobs)
    if distillation is not None:
        reason = " with `on_policy_distillation`"
        teacher = required(batch.ref_logprobs, "ref_logprobs", loss, reason)
        advantages = advantages + teacher_advantages(teacher, logprobs, distillation)
    advantages = at_labels(advantages, batch)
    if ratio_level == "none":
        log_ratios = torch.zeros_like(logprobs)
    else:
        old = required(batch.old_logprobs, "old_logprobs", loss)
        log_ratios = at_labels(statistics.logprobs - old, batch)
    return PolicyInputs(loss, statistics, batch, mask, logprobs, log_ratios, advantages)
