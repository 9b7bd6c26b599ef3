"""Faults of policy losses that users met elsewhere, each with the right value; named by id."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fastrl import BatchKwargs, Document, TokenBatch, TokenStatistics
from fastrl.config import AnyLossConfig, KLConfig
from fastrl.data.advantages import without_zero_groups
from fastrl.functional.kl import kl_estimate
from fastrl.layers.losses import LanguageModelPolicyGradientLoss, build_loss, finish_metrics
from fastrl.layers.losses.kl import kl_term
from tests.helpers.loss_cases import CASES, LossCase
from tests.helpers.loss_documents import random_statistics, reference_tokens, widen
from tests.helpers.loss_heads import capped_head

LOSSES_PAGE = Path(__file__).parents[3] / "docs" / "losses.md"


def loss_of(**config: Any) -> LanguageModelPolicyGradientLoss[Any]:
    parsed: AnyLossConfig = TypeAdapter(AnyLossConfig).validate_python(config)
    loss = build_loss(parsed)
    assert isinstance(loss, LanguageModelPolicyGradientLoss)
    return loss


def document_of(log_ratios: list[float], advantage: float = 1.0) -> Document:
    """One whose old log-probabilities are those of `at_zero` minus the log-ratios."""
    old = [-1.0, *(-1.0 - x for x in log_ratios)]
    return Document(tokens=[0] * len(old), prompt_length=1, logprobs=old, advantage=advantage)


def batch_of(*documents: Document) -> BatchKwargs:
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    return widen(batch)


def at_zero(batch: BatchKwargs, dtype: torch.dtype = torch.float64) -> TokenStatistics:
    """A policy whose every label has log-probability -1."""
    logprobs = torch.full((batch.num_tokens,), -1.0, dtype=dtype, requires_grad=True)
    entropy = torch.ones(batch.num_tokens, dtype=dtype, requires_grad=True)
    return TokenStatistics(logprobs, entropy, torch.zeros(batch.num_tokens, dtype=dtype))


def test_g1_each_document_has_its_own_ratio() -> None:
    batch = batch_of(*(document_of([0.1 * i] * 3) for i in (1, 2, 3)))
    terms = loss_of(type="gspo").prepare(at_zero(batch), batch)
    ratios = terms.ratio[batch.labels != -100].tolist()
    expected = [math.exp(0.1 * i) for i in (1, 2, 3) for _ in range(3)]
    assert ratios == pytest.approx(expected, abs=1e-7)  # old log-probabilities are fp32


def test_g2_the_ratio_is_the_mean_over_labels() -> None:
    document = Document(
        tokens=[0] * 4,
        loss_mask=[False, True, False, True],
        logprobs=[-1.0, -1.2, -10.0, -1.4],
        advantage=1.0,
    )
    batch = batch_of(document)
    statistics = at_zero(batch)
    terms = loss_of(type="gspo").prepare(statistics, batch)
    mask = batch.labels != -100
    assert terms.ratio[mask].tolist() == pytest.approx([math.exp(0.3)] * 2, rel=1e-7)
    (grad,) = torch.autograd.grad(terms.ratio[mask][0], statistics.logprobs)
    assert grad[mask].tolist() == pytest.approx([math.exp(0.3) / 2] * 2, rel=1e-7)
    assert grad[~mask].count_nonzero() == 0


@pytest.mark.parametrize(("normalisation", "expected"), [("documents", 0.0), ("tokens", 0.5)])
def test_g3_a_document_weighs_once_or_by_its_tokens(normalisation: str, expected: float) -> None:
    batch = batch_of(document_of([0.0], 1.0), document_of([0.0] * 3, -1.0))
    loss = loss_of(type="gspo", normalisation=normalisation)
    assert loss(at_zero(batch), batch).item() == pytest.approx(expected, abs=1e-7)
    assert loss_of(type="gspo").config.normalisation == "documents"


KL_GRADIENTS = [
    ("k1", "estimator", 0.0),
    ("k2", "estimator", 0.205990),
    ("k3", "estimator", 0.25),
    ("k3", "ratio", 0.205990),
    ("k1", "ratio", 0.205990),
    ("k1", "straight_through", 0.205990),
    ("k3", "straight_through", 0.205990),
]


@pytest.mark.parametrize(("estimator", "gradient", "expected"), KL_GRADIENTS)
def test_k1_gradient_of_the_sampled_kl(estimator: str, gradient: str, expected: float) -> None:
    logits = torch.tensor([math.log(3), 0.0], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    # `model_construct`: the config refuses k1 with its plain gradient, which is the point here.
    config = KLConfig.model_construct(
        coefficient=1.0, estimator=estimator, gradient=gradient, ratio_level="token"
    )
    ratio = (logprobs - logprobs.detach()).exp()
    terms = kl_term(logprobs + math.log(2), ratio, config, config.coefficient)
    average = (terms * logprobs.exp().detach()).sum()
    (grad,) = torch.autograd.grad(average, logits)
    assert grad[0].item() == pytest.approx(expected, abs=1e-6)
    if estimator != "k2":
        assert average.item() == pytest.approx(0.130812, abs=1e-6)


def test_k1_k2_and_k3_are_never_negative() -> None:
    differences = torch.cat([torch.linspace(-30, 30, 1001), torch.logspace(-30, 0, 100)])
    for estimator in ("k2", "k3"):
        assert kl_estimate(differences, estimator).min() >= 0
        assert kl_estimate(-differences, estimator).min() >= 0


def test_k1_without_a_gradient_is_refused() -> None:
    with pytest.raises(ValidationError, match="`estimator: k1` must not go with"):
        KLConfig(coefficient=1.0, estimator="k1", gradient="estimator")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [95.0, -95.0])
def test_e4_a_far_reference_stays_finite(gap: float, estimator: str) -> None:
    document = Document(
        tokens=[0, 0], prompt_length=1, logprobs=[-1.0], ref_logprobs=[-1.0 + gap], advantage=0.0
    )
    (batch,) = TokenBatch.from_documents([document]).to_kwargs()
    statistics = at_zero(batch, torch.float32)
    gradient = "estimator" if estimator == "k2" else "ratio"
    kl = {"coefficient": 0.001, "estimator": estimator, "gradient": gradient}
    loss = loss_of(type="grpo", kl=kl)(statistics, batch)
    (grad,) = torch.autograd.grad(loss, statistics.logprobs)
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert abs(loss.item()) <= 0.001 * math.exp(20)


def test_e4_twelve_is_no_overflow() -> None:
    assert kl_estimate(torch.tensor(-12.0), "k3").item() == pytest.approx(
        math.exp(12) - 1 - 12, rel=1e-6
    )


@pytest.mark.parametrize(("keep", "expected"), [(True, -0.5), (False, -1.0)])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_d5_groups_of_zero_advantage(keep: bool, expected: float, beta: float) -> None:
    def document(advantage: float) -> Document:
        return Document(
            tokens=[0] * 5,
            prompt_length=1,
            logprobs=[-1.0] * 4,
            ref_logprobs=[-1.5] * 4,
            advantage=advantage,
            group_id=str(advantage),
        )

    documents = [document(1.0), document(0.0)]
    batch = batch_of(*(documents if keep else without_zero_groups(documents)))
    statistics = at_zero(batch)
    kl = {"kl": {"coefficient": beta}} if beta else {}
    loss = loss_of(type="grpo", **kl)(statistics, batch)
    penalty = beta * (math.exp(-0.5) - 1 + 0.5)
    assert loss.item() == pytest.approx(expected + penalty, abs=1e-7)
    (grad,) = torch.autograd.grad(loss, statistics.logprobs)
    zero_group = grad[batch.document_index == 1]
    assert bool(zero_group.count_nonzero()) == (keep and beta > 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(0.5, 1.0, -0.5), (10.0, -1.0, 3.0), (10.0, 1.0, -1.2)]
)
def test_c1_dual_clip_acts_on_bad_actions_alone(
    ratio: float, advantage: float, expected: float
) -> None:
    batch = batch_of(document_of([math.log(ratio)], advantage))
    loss = loss_of(type="grpo", epsilon_low=0.2, epsilon_high=0.2, delta=3.0)
    assert loss(at_zero(batch), batch).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("delta", [1.0, 0.5])
def test_c1_a_bound_of_one_is_refused(delta: float) -> None:
    with pytest.raises(ValidationError, match="greater than 1"):
        loss_of(type="grpo", delta=delta)


def test_c4_the_second_bound_counts_as_high() -> None:
    batch = batch_of(document_of([math.log(5)], -1.0), document_of([math.log(2)], -1.0))
    loss = loss_of(type="grpo", delta=4.0)
    metrics = finish_metrics(loss.metrics(at_zero(batch), batch))
    assert metrics["clip_fraction"].item() == metrics["clip_fraction_high"].item() == 0.5
    assert metrics["clip_fraction_low"].item() == 0


@pytest.mark.parametrize("loss", ["grpo", "gspo", "gspo_token", "gmpo", "dppo"])
def test_c4_clip_fractions_look_at_ratio_and_sign(loss: str) -> None:
    cases = ((1.5, 1.0), (0.5, -1.0), (1.5, -1.0), (0.5, 1.0), (0.5, 0.0))
    batch = batch_of(*(document_of([math.log(ratio)], sign) for ratio, sign in cases))
    metrics = finish_metrics(
        loss_of(type=loss, epsilon_low=0.1, epsilon_high=0.1).metrics(at_zero(batch), batch)
    )
    assert metrics["clip_fraction"].item() == 0.4
    assert metrics["clip_fraction_low"].item() == 0.2
    assert metrics["clip_fraction_high"].item() == 0.2


def test_c22_gmpo_counts_what_it_clipped_by_the_token_s_own_sign() -> None:
    """The mean advantage is positive; tokens of a negative one are clipped below nevertheless."""
    ratios = [2.0, 0.5, 2.0, 0.5, 1.0, 0.5]
    advantages = [4.0, 4.0, -1.0, -1.0, -1.0, 0.0]
    values = {"logprobs": [-1.0 - math.log(r) for r in ratios], "advantage": advantages}
    mixed = Document(tokens=[0] * 7, prompt_length=1, **values)  # type: ignore[arg-type]
    # Advantages that cancel: the document has no loss, and nothing of it is clipped.
    values = {"logprobs": [-1.0 - math.log(2), -1.0 + math.log(2)], "advantage": [1.0, -1.0]}
    batch = batch_of(mixed, Document(tokens=[0] * 3, prompt_length=1, **values))  # type: ignore[arg-type]
    loss, statistics = loss_of(type="gmpo", epsilon_low=0.1, epsilon_high=0.1), at_zero(batch)
    metrics = finish_metrics(loss.metrics(statistics, batch))
    assert metrics["clip_fraction_high"].item() == pytest.approx(1 / 8)
    assert metrics["clip_fraction_low"].item() == pytest.approx(2 / 8)
    assert metrics["clip_fraction"].item() == pytest.approx(3 / 8)
    (grad,) = torch.autograd.grad(loss(statistics, batch), statistics.logprobs)
    cut = (grad == 0) & (batch.labels != -100)
    assert cut.nonzero()[:, 0].tolist() == [0, 3, 5, 7, 8]


DUAL_CLIP = "min(-min(r A, clip(r) A), -delta A)"


def test_w21_the_formula_of_the_dual_clip_is_that_of_the_loss() -> None:
    assert f"`{DUAL_CLIP}`" in LOSSES_PAGE.read_text(encoding="utf-8")
    for delta in (1.02, 3.0):
        for r in (0.5, 1.01, 1.2, 1.5, 10.0):
            batch = batch_of(document_of([math.log(r)], -1.0))
            bounded = min(-min(-r, -min(max(r, 0.8), 1.28)), delta)
            loss = loss_of(type="grpo", delta=delta, epsilon_low=0.2, epsilon_high=0.28)
            value = loss(at_zero(batch), batch).item()
            assert value == pytest.approx(bounded, rel=1e-6)  # old log-probabilities are fp32
            # TRL bounds the ratio alone: another function where delta is below the clip.
            trl = -min(-min(r, delta), -min(max(r, 0.8), 1.28))
            assert (value == pytest.approx(trl, rel=1e-6)) == (delta >= 1.28 or r <= 1.02)


def test_w21_the_margin_of_dpo_is_beta_times_that_of_the_docs() -> None:
    assert "`beta` times the `m` of" in LOSSES_PAGE.read_text(encoding="utf-8")
    margins = []
    for beta in (0.1, 0.5):
        loss = LossCase("dpo", {"type": "dpo", "beta": beta}, pairs=True)
        batch = loss.batch()
        torch.manual_seed(0)
        margins.append(loss.loss().metrics(random_statistics(batch), batch)["margin"].item())
    assert margins[1] == pytest.approx(5 * margins[0])
    assert margins[0] != 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_d1_no_label_at_all(case: LossCase) -> None:
    batch = case.batch()
    empty = batch.replace(
        labels=torch.full_like(batch.labels, -100),
        label_counts=torch.zeros_like(batch.label_counts),
        group_label_counts=torch.zeros_like(batch.label_counts),
        num_labels_in_batch=0,
        num_documents_in_batch=torch.tensor(0),
        num_groups_in_batch=0,
    )
    statistics = random_statistics(batch)
    loss = case.loss()(statistics, empty)
    assert loss.item() == 0
    grads = torch.autograd.grad(loss, statistics.vectors(), allow_unused=True)
    assert all(grad is None or grad.count_nonzero() == 0 for grad in grads)
    metrics = finish_metrics(case.loss().metrics(statistics, empty))
    assert all(value.isfinite() for value in metrics.values())


GARBAGE = [-math.inf, math.inf, math.nan]


@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_e1_slots_without_label_may_hold_anything(case: LossCase, value: float) -> None:
    batch = case.batch()
    statistics = random_statistics(batch)
    expected = case.loss()(statistics, batch)
    unlabelled = batch.labels == -100

    def spoil(vector: Tensor) -> Tensor:
        return torch.where(unlabelled, value, vector.detach()).requires_grad_()

    columns = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    spoilt = batch.replace(**{name: spoil(getattr(batch, name)).detach() for name in columns})
    leaves = statistics.map(spoil)
    loss = case.loss()(leaves, spoilt)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, leaves.vectors(), allow_unused=True)
    for grad in grads:
        if grad is not None:
            assert grad.isfinite().all()
            assert grad[unlabelled].count_nonzero() == 0


@pytest.mark.parametrize("logprob", [-100.0, -math.inf])
def test_e1_a_token_that_a_mask_drops_may_be_out_of_range(logprob: float) -> None:
    batch = batch_of(document_of([0.0, 0.0]), document_of([0.0], -1.0))
    statistics = at_zero(batch, torch.float32)
    with torch.no_grad():
        statistics.logprobs[batch.document_index == 1] = logprob
    loss = loss_of(type="cispo", off_policy_mask={"threshold": 1.0})(statistics, batch)
    (grad,) = torch.autograd.grad(loss, statistics.logprobs)
    assert loss.item() == pytest.approx(2 / 3)
    assert grad.isfinite().all()
    assert grad[batch.document_index == 1].count_nonzero() == 0


def test_f1_an_impossible_entry_does_not_spoil_the_bonus() -> None:
    from fastrl.functional.linear_logprobs import linear_logprobs

    hidden = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.zeros(3, 1, dtype=torch.float64)
    bias = torch.tensor([1.0, 0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    (batch,) = TokenBatch.from_documents([document_of([0.0])]).to_kwargs()
    statistics = linear_logprobs(hidden, weight, batch.labels, bias=bias, entropy=True)
    loss = loss_of(type="reinforce", entropy={"bonus": 1.0})(
        statistics, batch.replace(advantages=torch.zeros(2))
    )
    assert loss.item() == pytest.approx(-0.582203, abs=1e-6)
    (grad,) = torch.autograd.grad(loss, bias)
    assert grad.tolist() == pytest.approx([0.196612, -0.196612, 0.0], abs=1e-6)


def test_t4_the_bonus_is_that_of_the_sampled_distribution() -> None:
    head = capped_head({"policy": {"type": "reinforce", "entropy": {"bonus": 1.0}}}, softcap=None)
    with torch.no_grad():
        head.weight.zero_()
        assert head.bias is not None
        head.bias.fill_(-math.inf)
        head.bias[:2] = torch.tensor([2.0, 0.0])
    batch = batch_of(document_of([0.0], 0.0)).replace(temperature=0.5)
    output = head(torch.zeros(2, 5, dtype=torch.float64), batch, return_logprobs=True)
    assert output.loss.item() == pytest.approx(-0.090095, abs=1e-6)
    assert output.logprobs[0].item() == pytest.approx(-0.018150, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dppo_s_kl_is_finite_where_a_label_is_certain(dtype: torch.dtype) -> None:
    """Beside values: risen to 1 and fallen from 1 too far; 1 as before; risen by a rounding."""
    news, olds = [0.0, math.log(0.8), 0.0, 0.0], [math.log(0.97), 0.0, 0.0, -1e-6]
    values = {"logprobs": olds, "advantage": [1.0, -1.0, 1.0, 1.0]}
    batch = batch_of(Document(tokens=[0] * 5, prompt_length=1, **values))  # type: ignore[arg-type]
    loss = loss_of(type="dppo", divergence="kl")
    case = LossCase("", {"type": "dppo", "divergence": "kl"})
    statistics = at_zero(batch)
    with torch.no_grad():
        statistics.logprobs[:4] = torch.tensor(news)
    expected = case.reference(reference_tokens(statistics, batch))
    (expected_grad,) = torch.autograd.grad(expected, statistics.logprobs)
    narrow = replace(statistics, logprobs=statistics.logprobs.detach().to(dtype).requires_grad_())
    found = loss(narrow, batch)
    (grad,) = torch.autograd.grad(2.5 * found, narrow.logprobs)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-12)
    torch.testing.assert_close(grad, 2.5 * expected_grad.to(dtype))
    assert grad[:4].count_nonzero() == 2
    metrics = finish_metrics(loss.metrics(narrow, batch))
    assert [metrics[f"clip_fraction_{side}"].item() for side in ("low", "high")] == [0.25, 0.25]
