"""The definition of the divergences of two distributions over the vocabulary, in plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def token_divergence(
    z: Tensor,  # [V]
    z_teacher: Tensor,  # [V]
    divergence: str,
    beta: float | None,
) -> Tensor:
    """The divergence of one token."""
    student, teacher = torch.log_softmax(z, 0), torch.log_softmax(z_teacher, 0)
    return divergence_of_bins(list(student), list(teacher), divergence, beta)


def recorded_divergence(
    z: Tensor,  # [V]
    ids: list[int],
    logprobs: list[float],
    divergence: str,
    beta: float | None,
) -> Tensor:
    """The divergence of one token from a teacher of which some ids are recorded.

    All others are one bin of both distributions, if there are any; its probability under the
    teacher is 1e-7 at least.
    """
    log_s = torch.log_softmax(z, 0)
    student, teacher = [log_s[v] for v in ids], [z.new_tensor(value) for value in logprobs]
    others = [log_s[v] for v in range(len(z)) if v not in ids]
    if others:
        student.append(torch.logsumexp(torch.stack(others), 0))
        mass = sum(math.exp(value) for value in logprobs)
        teacher.append(z.new_tensor(math.log(max(1 - mass, 1e-7))))
    return divergence_of_bins(student, teacher, divergence, beta)


def divergence_of_bins(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    divergence: str,
    beta: float | None,
) -> Tensor:
    """The divergence of two lists of log-probabilities; M = beta T + (1 - beta) S."""

    def kl(log_p: Sequence[Tensor], log_q: Sequence[Tensor]) -> Tensor:
        total = log_p[0].new_zeros(())
        for p, q in zip(log_p, log_q, strict=True):
            if p > -torch.inf:
                total = total + torch.exp(p) * (p - q)
        return total

    if divergence == "forward_kl":
        return kl(teacher, student)
    if divergence == "reverse_kl":
        return kl(student, teacher)
    assert beta is not None
    mixture = [
        torch.log(beta * torch.exp(t) + (1 - beta) * torch.exp(s))
        for s, t in zip(student, teacher, strict=True)
    ]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
