"""Divergence of the head's distribution from a teacher's, without either's logits in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.full_rows import LogitRows, full_rows
from fastrl.functional.head.matmul import matmul
from fastrl.functional.head.sharding import gather_hidden
from fastrl.functional.head.torch_rows import transformed
from fastrl.kernels.arguments import LogitTransform

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]

# Stands for -inf: the exponential of it is 0 as well, and 0 times it is not NaN.
LOWEST_LOGPROB = -1e4


@dataclass(frozen=True)
class Teacher:
    """The teacher's hidden states and head.

    Attributes:
        hidden_states: [T, D'] of the same tokens, sharded like the student's.
        weight: [V, D'], or [V_local, D'] under vocabulary parallelism, rows as the student's.
        bias: [V] or [V_local].
        softcap: as in `linear_logprobs`, like `logit_scale`.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0


def teacher_divergence(
    call: HeadCall,
    teacher: Teacher,
    divergence: Divergence,
    beta: float | None = None,
) -> Tensor:  # [T]
    """The divergence of each labelled token in nats, 0 at others; differentiable in the student.

    With S the student's and T the teacher's distribution at the temperature of the call:

        forward_kl      sum T (log T - log S)           dz = S - T
        reverse_kl      sum S (log S - log T)           dz = S (log S - log T - divergence)
        jensen_shannon  beta KL(T, M) + (1 - beta) KL(S, M),  M = beta T + (1 - beta) S
                        dz = (1 - beta) S (log S - log M - KL(S, M))

    Args:
        call: of the student, from `check_inputs`.
        teacher: receives no gradient.
        divergence: one of the three.
        beta: only for `jensen_shannon`.

    Raises:
        ValueError: the teacher's tensors do not fit the student's, or its cap is not positive.
    """
    _check_teacher(teacher, call.hidden_states, call.weight)
    teacher_hidden = gather_hidden(teacher.hidden_states.detach(), call.groups)
    transform = LogitTransform(call.transform.temperature, teacher.softcap, teacher.logit_scale)
    teacher_bias = None if teacher.bias is None else teacher.bias.detach()
    tile = replace(call.tile(), bias=teacher_bias)

    def value(rows: LogitRows) -> Tensor:
        with torch.no_grad():
            hidden = teacher_hidden[rows.tokens]
            products = matmul(hidden, teacher.weight.detach().t()).to(rows.z.dtype)
            teacher_z, _ = transformed(products, transform.rows(rows.tokens), tile)
            log_t = (teacher_z - rows.logsumexp(teacher_z)[:, None]).clamp(min=LOWEST_LOGPROB)
        log_s = (rows.z - rows.to_columns(rows.logsumexp())).clamp(min=LOWEST_LOGPROB)
        return rows.sum(column_divergence(log_s, log_t, divergence, beta))[None]

    return full_rows(call, value, 1)[0]


def column_divergence(
    log_s: Tensor,  # [R, S]
    log_t: Tensor,  # [R, S]
    divergence: Divergence,
    beta: float | None,
) -> Tensor:  # [R, S]
    """The summands of the divergence over the vocabulary."""
    if divergence == "forward_kl":
        return log_t.exp() * (log_t - log_s)
    if divergence == "reverse_kl":
        return log_s.exp() * (log_s - log_t)
    assert beta is not None
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
    return beta * log_t.exp() * (log_t - log_m) + (1 - beta) * log_s.exp() * (log_s - log_m)


def _check_teacher(teacher: Teacher, hidden_states: Tensor, weight: Tensor) -> None:
    hidden = teacher.hidden_states
    if hidden.ndim != 2 or hidden.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"`teacher.hidden_states` must be of shape [{hidden_states.shape[0]}, D], of the tokens"
            f" of `hidden_states`, got {list(hidden.shape)}."
        )
    if teacher.weight.shape != (weight.shape[0], hidden.shape[1]):
        raise ValueError(
            f"`teacher.weight` must be of shape [{weight.shape[0]}, {hidden.shape[1]}], the rows of"
            f" `weight`, got {list(teacher.weight.shape)}; the vocabularies must be the same."
        )
    if teacher.bias is not None and teacher.bias.shape != weight.shape[:1]:
        raise ValueError(
            f"`teacher.bias` must be of shape [{weight.shape[0]}], got {list(teacher.bias.shape)}."
        )
    if teacher.softcap is not None and not teacher.softcap > 0:
        raise ValueError(f"`teacher.softcap` must be positive or None, got {teacher.softcap}.")
