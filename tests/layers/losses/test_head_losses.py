"""Each loss and option under the head: both strategies and all chunkings give the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastrl import (
    BatchKwargs,
    LanguageModelHead,
    TokenBatch,
    TokenStatistics,
)
from fastrl.functional.head.distillation import Teacher
from fastrl.functional.reference import head as reference
from fastrl.functional.reference.divergences import recorded_divergence, token_divergence
from tests.helpers.loss_cases import BY_NAME, CASES, LossCase
from tests.helpers.loss_documents import VOCAB_SIZE, pack, policy_documents, reference_tokens, widen
from tests.helpers.loss_heads import (
    assert_equal_gradients,
    capped_head,
    close_to_policy,
    make_teacher,
    random_hidden,
)

CHUNKS = (1, 12)


def definition(
    head: LanguageModelHead,
    hidden: Tensor,
    batch: BatchKwargs,
    case: LossCase,
    teacher: Teacher | None = None,
) -> Tensor:
    """The loss with logits materialised, in plain loops."""
    parsed = case.parsed

    def logits(
        states: Tensor, weight: Tensor, bias: Tensor | None, cap: float | None, scale: float
    ) -> Tensor:
        return reference.logits(
            states,
            weight,
            bias=bias,
            temperature=batch.temperature / parsed.logits_scale,
            softcap=cap,
            logit_scale=scale,
            vocab_size=VOCAB_SIZE,
        )

    z = logits(hidden, head.weight, head.bias, head.config.softcap, head.config.logit_scale)
    statistics = TokenStatistics(*reference.token_statistics(z, batch.labels), mean_logit=z.mean(1))
    if teacher is not None:
        z_teacher = logits(
            teacher.hidden_states,
            teacher.weight,
            teacher.bias,
            teacher.softcap,
            teacher.logit_scale,
        )
        options = case.options
        divergences = [
            token_divergence(a, b, options["divergence"], options["beta"])
            for a, b in zip(z, z_teacher, strict=True)
        ]
        statistics = replace(statistics, divergence=torch.stack(divergences))
    if case.recorded:
        statistics = replace(statistics, divergence=recorded_divergences(z, batch, case))
    return parsed.weight * case.reference(reference_tokens(statistics, batch))


def recorded_divergences(z: Tensor, batch: BatchKwargs, case: LossCase) -> Tensor:
    """Those of the tokens with a label, one after the other."""
    entries, options = batch.teacher_tokens, case.options
    assert entries is not None
    assert entries.logprobs is not None
    values = []
    for t, label in enumerate(batch.labels.tolist()):
        mine = entries.slots == t
        ids, logprobs = entries.ids[mine].tolist(), entries.logprobs[mine].tolist()
        values.append(
            z[t, 0] * 0
            if label == -100
            else recorded_divergence(z[t], ids, logprobs, options["divergence"], options["beta"])
        )
    return torch.stack(values)


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_head_equals_the_definition(case: LossCase, strategy: str) -> None:
    head = capped_head({"policy": dict(case.config)}, strategy=strategy)
    batch = case.batch()
    hidden = random_hidden(batch).requires_grad_()
    batch = close_to_policy(head, hidden, batch)
    needs_teacher = "divergence" in case.loss().needs and not case.recorded
    teacher = make_teacher(batch) if needs_teacher else None
    if strategy == "single_pass" and (
        case.loss().scope in ("group", "batch") or case.loss().needs - {"entropy"}
    ):
        with pytest.raises(ValueError, match="`strategy: single_pass` must"):
            head(hidden, batch, teacher=teacher)
        return
    for chunk_size in CHUNKS:
        if strategy == "single_pass" and case.loss().scope == "document" and chunk_size == 1:
            continue  # no document fits a chunk
        head = capped_head(
            {"policy": dict(case.config)},
            strategy=strategy,
            chunk_size=chunk_size,
            metrics=chunk_size != 1,
        )
        loss = head(hidden, batch, teacher=teacher).loss
        expected = definition(head, hidden, batch, case, teacher)
        assert_equal_gradients(head, hidden, loss, expected, 1e-10)


@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_losses_of_several_scales_and_weights(strategy: str) -> None:
    names = ("grpo", "cross_entropy", "z_loss", "gspo", "grpo_bonus")
    scales = (1.0, 0.5, 0.5, 1.0, 2.0)
    losses = {
        name: dict(BY_NAME[name].config) | {"logits_scale": scale, "weight": 0.3 + i}
        for i, (name, scale) in enumerate(zip(names, scales, strict=True))
    }
    head = capped_head(losses, strategy=strategy, chunk_size=12)
    batch = pack(policy_documents()).replace(temperature=0.8)
    hidden = random_hidden(batch).requires_grad_()
    batch = close_to_policy(head, hidden, batch)
    output = head(hidden, batch, return_logprobs=True)
    expected = torch.stack(
        [definition(head, hidden, batch, LossCase(name, config)) for name, config in losses.items()]
    ).sum()
    assert_equal_gradients(head, hidden, output.loss, expected, 1e-10)
    head.eval()
    evaluated = head(hidden, batch)
    torch.testing.assert_close(output.logprobs, evaluated.logprobs)
    torch.testing.assert_close(output.entropy, evaluated.entropy)


def test_logprobs_without_a_loss_of_scale_one() -> None:
    head = capped_head({"policy": {"type": "grpo", "logits_scale": 2.0}})
    batch = pack(policy_documents())
    hidden = random_hidden(batch)
    output = head(hidden, batch, return_logprobs=True)
    head.eval()
    torch.testing.assert_close(output.logprobs, head(hidden, batch).logprobs)


def test_statistics_on_request() -> None:
    head = capped_head({"policy": {"type": "grpo"}})
    batch = pack(policy_documents())
    hidden = random_hidden(batch).requires_grad_()
    names = ("mean_logit", "sum_squares", "is_argmax")
    output = head(hidden, batch, statistics=names)
    assert not head(hidden, batch).statistics
    z = reference.logits(
        hidden, head.weight, bias=head.bias, softcap=head.config.softcap, vocab_size=VOCAB_SIZE
    )
    for t, label in enumerate(batch.labels.tolist()):
        wanted = (0.0, 0.0, False)
        if label != -100:
            p = torch.softmax(z[t], 0)
            wanted = (z[t].mean().item(), (p * p).sum().item(), z[t].argmax().item() == label)
        for name, value in zip(names, wanted, strict=True):
            assert output.statistics[name][t].item() == pytest.approx(value, abs=1e-12)
    assert not any(value.requires_grad for value in output.statistics.values())
    with pytest.raises(ValueError, match=r"`statistics` must be among .*, got \['mean'\]"):
        head(hidden, batch, statistics=["mean"])


def test_a_teacher_is_given_where_it_is_needed_alone() -> None:
    batch = pack(policy_documents())
    hidden = random_hidden(batch)
    with pytest.raises(ValueError, match=r"`teacher` must be given for the losses \['policy'\]"):
        capped_head({"policy": {"type": "distillation"}})(hidden, batch)
    with pytest.raises(ValueError, match="`teacher` must not be given without a loss of type"):
        capped_head({"policy": {"type": "grpo"}})(hidden, batch, teacher=make_teacher(batch))
    teacher = make_teacher(batch)
    with pytest.raises(ValueError, match=r"`teacher.weight` must be of shape \[33, 7\]"):
        capped_head({"policy": {"type": "distillation"}})(
            hidden, batch, teacher=replace(teacher, weight=teacher.weight[:-1])
        )
    with pytest.raises(ValueError, match=r"`teacher.softcap` must be positive or None, got 0"):
        capped_head({"policy": {"type": "distillation"}})(
            hidden, batch, teacher=replace(teacher, softcap=0.0)
        )


def test_distillation_beside_a_policy_loss() -> None:
    losses = {
        "policy": dict(BY_NAME["grpo"].config),
        "forward": {"type": "distillation", "weight": 0.5},
        "reverse": {"type": "distillation", "divergence": "reverse_kl", "logits_scale": 0.5},
    }
    head = capped_head(losses)
    batch = pack(policy_documents())
    hidden = random_hidden(batch).requires_grad_()
    batch = close_to_policy(head, hidden, batch)
    teacher = make_teacher(batch)
    output = head(hidden, batch, teacher=teacher)
    expected = torch.stack(
        [
            definition(
                head, hidden, batch, LossCase(name, config), None if name == "policy" else teacher
            )
            for name, config in losses.items()
        ]
    ).sum()
    assert_equal_gradients(head, hidden, output.loss, expected, 1e-10)


def test_a_micro_sequence_has_no_sums_over_documents_that_it_cuts() -> None:
    whole = TokenBatch.from_documents(policy_documents(), pad_to_multiple=8)
    batch, pieces = widen(whole.to_kwargs()[0]), whole.to_kwargs(micro_sequences=2)
    hidden = random_hidden(batch).split(batch.num_tokens // 2)
    for name in ("grpo", "gspo"):
        head = capped_head({"policy": dict(BY_NAME[name].config)})
        (joined,) = whole.to_kwargs(micro_sequences=2, join=True)
        expected = head(torch.cat(hidden), widen(joined)).loss
        torch.testing.assert_close(head(torch.cat(hidden), batch).loss, expected)
        if name == "grpo":
            parts = [head(h, widen(p)).loss for h, p in zip(hidden, pieces, strict=True)]
            torch.testing.assert_close(torch.stack(parts).sum(), expected)
        else:
            with pytest.raises(ValueError, match="`batch` must hold its documents whole"):
                head(hidden[0], widen(pieces[0]))
