"""Divergence of the head's distribution from the recorded top of a teacher's."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.call import HeadCall
from fastrl.functional.head.distillation import LOWEST_LOGPROB, Divergence, column_divergence
from fastrl.functional.head.full_rows import LogitRows, full_rows
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.value_checks import require_all

LOWEST_REST = 1e-7
"""Least probability of all that a teacher did not record: sums of fp32 numbers tell no less from
0, which in a reverse KL would be an infinite divergence."""


def recorded_divergence(
    call: HeadCall,
    teacher: KeptTokens,
    divergence: Divergence,
    beta: float | None = None,
) -> Tensor:  # [T]
    """The divergence of each labelled token in nats, 0 at others; differentiable in the logits.

    Of two distributions over the recorded ids K of the token and one bin for all other ids. With S
    the policy's probabilities at the temperature of the call, and T the recorded ones:

        s_v = S_v, t_v = T_v  (v in K)     s_rest = sum_{v not in K} S_v
                                           t_rest = max(1 - sum_{v in K} T_v, LOWEST_REST)
        forward_kl  sum_b t_b (log t_b - log s_b)      dz_v = s_v (1 - t_b(v) / s_b(v))
        reverse_kl  sum_b s_b (log s_b - log t_b)
                    dz_v = s_v (log s_b(v) - log t_b(v) - divergence)

    with b(v) the bin of v, and `jensen_shannon` as in `teacher_divergence`. Where K is the whole
    vocabulary there is no rest, and it is that function. `s_rest` is summed over the ids outside of
    K, so that a small one has all its digits. In chunks of rows, as `full_rows`.

    Args:
        call: of the policy, from `check_inputs`; under `tp` each rank sums its columns.
        teacher: of the call's tokens, the same on all ranks of `tp`, with log-probabilities.
        divergence: one of the three.
        beta: only for `jensen_shannon`.

    Raises:
        ValueError: an id outside of the vocabulary; on a GPU an asynchronous assertion.

    References:
        TRL's experimental `ServerDistillationTrainer` and `AsyncDistillationTrainer`, which bound
        the rest of the policy below by the same number, where its gradient is 0.
    """
    _check_ids(teacher, call.vocab_size)
    vocab_size = call.vocab_size

    def value(rows: LogitRows) -> Tensor:
        with torch.no_grad():
            kept, log_t = _in_rows(teacher, rows)
            mass = rows.sum(torch.where(kept, log_t.exp(), 0))
            rest_t = (1 - mass).clamp(min=LOWEST_REST).log()
            has_rest = rows.sum(kept.to(rows.z.dtype)) < vocab_size
        log_s = (rows.z - rows.to_columns(rows.logsumexp())).clamp(min=LOWEST_LOGPROB)
        of_ids = torch.where(kept, column_divergence(log_s, log_t, divergence, beta), 0)
        smallest = torch.finfo(rows.z.dtype).tiny
        rest_s = rows.sum(torch.where(kept, 0, log_s.exp())).clamp(min=smallest).log()
        of_rest = column_divergence(rest_s, rest_t, divergence, beta)
        return (rows.sum(of_ids) + torch.where(has_rest, of_rest, 0))[None]

    return full_rows(call, value, 1)[0]


def _in_rows(teacher: KeptTokens, rows: LogitRows) -> tuple[Tensor, Tensor]:  # [R, S], [R, S]
    """Which of the columns are recorded for each row, and their log-probabilities, 0 elsewhere."""
    assert teacher.logprobs is not None
    num_rows, num_columns = rows.z.shape
    row = teacher.places(rows.tokens, num_rows)[teacher.slots]
    column = teacher.ids - rows.tile.first_column
    is_here = (row < num_rows) & (column >= 0) & (column < num_columns)
    # Other entries go to a spare place.
    place = torch.where(is_here, row * num_columns + column, num_rows * num_columns)
    values = rows.z.new_zeros(num_rows * num_columns + 1)
    kept = torch.zeros_like(values, dtype=torch.bool).index_fill_(0, place, True)
    values = values.index_copy_(0, place, teacher.logprobs.to(values.dtype))
    shape = (num_rows, num_columns)
    return kept[:-1].view(shape), values[:-1].view(shape)


def _check_ids(teacher: KeptTokens, vocab_size: int) -> None:
    is_there = (teacher.ids < vocab_size) | (teacher.slots < 0)
    message = f"`teacher_tokens` must be ids below the vocabulary size {vocab_size}"
    require_all(is_there, message, lambda: f", got {int(teacher.ids[~is_there][0])}")
