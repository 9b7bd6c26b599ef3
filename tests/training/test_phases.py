"""The updates of a step: nothing depends on how its documents are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fastrl import HeadOutput, OptimizerStep
from fastrl.functional.batch import BatchKwargs
from fastrl.training.context import RunContext, build_context, processes_of
from fastrl.training.environment import Scores
from fastrl.training.llama_model import LlamaModel
from fastrl.training.phases import Phase
from fastrl.training.step_metrics import PendingUpdate
from tests.helpers.runs import begin_phase, tiny, tiny_context

pytestmark = pytest.mark.usefixtures("lively_rewards")

GSPO = "phases.1.losses={policy: {type: gspo, epsilon_low: 0.02, epsilon_high: 0.03}}"


def _give_rewards(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, rewards: list[float]
) -> None:
    assert context.environment is not None
    scores = Scores(rewards, {})
    monkeypatch.setattr(context.environment, "score", lambda problems, answers: scores)


def _weights_after(index: int, num_steps: int, *overrides: str) -> dict[str, torch.Tensor]:
    config, context = tiny_context(*overrides)
    phase = begin_phase(config, index, context)
    for _ in range(num_steps):
        phase.step()
    return {name: weight.clone() for name, weight in context.model.module.state_dict().items()}


@pytest.mark.parametrize("loss", ["phases.1.losses={policy: {type: grpo}}", GSPO])
@pytest.mark.parametrize("index", [0, 1])
def test_accumulation_gives_the_same_weights(index: int, loss: str) -> None:
    bounds = [f"phases.{index}.max_tokens_per_micro_batch={tokens}" for tokens in (11, 50, 10000)]
    one_each, some, whole = (_weights_after(index, 2, loss, bound) for bound in bounds)
    start = _weights_after(index, 0)
    for name, weight in whole.items():
        assert not torch.equal(weight, start[name]), name
        torch.testing.assert_close(some[name], weight, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one_each[name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_tokens", [11, 10000])
def test_i1_the_first_ratio_of_a_step_is_exactly_1(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-equal also in float32, with documents packed and chunked as they are."""
    config, context = tiny_context(
        "dtype=float32", f"phases.1.max_tokens_per_micro_batch={max_tokens}", "phases.1.epochs=2"
    )
    phase = begin_phase(config, 1, context)
    ratios = []
    update = Phase._update

    def recorded(
        phase: Phase,
        step: OptimizerStep,
        outputs: Sequence[HeadOutput],
        number: int,
        num_updates: int,
    ) -> PendingUpdate:
        result = update(phase, step, outputs, number, num_updates)
        values = result.metrics.values
        ratios.append((values["policy/ratio_min"], values["policy/ratio_max"]))
        return result

    monkeypatch.setattr(Phase, "_update", recorded)
    phase.step()
    phase.step()
    assert len(ratios) == 2 * 2 * 2
    assert ratios[0] == ratios[4] == (1.0, 1.0)
    for ratio in (*ratios[1:4], *ratios[5:]):
        assert ratio != (1.0, 1.0)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"phases.1.mini_batches": 1}, 0),
        ({"phases.1.mini_batches": 1, "phases.1.losses.policy.on_policy": "true"}, 0),
        ({"phases.1.mini_batches": 1, "parallel.micro_sequences": 2}, 0),
        ({"phases.1.mini_batches": 1, "phases.1.epochs": 3}, 0),
        # The second mini-batch is one of a policy that has moved.
        ({"phases.1.mini_batches": 2, "phases.1.epochs": 2}, 1),
        ({"phases.1.mini_batches": 1, "phases.1.losses.policy.logits_scale": 0.9}, 1),
        ({"phases.1.epochs": 2, "phases.1.mini_batches": 1, "parallel.micro_sequences": 2}, 1),
    ],
    ids=["one", "on_policy", "pieces", "epochs", "mini_batches", "scaled", "pieces_and_epochs"],
)
def test_the_first_update_gives_the_old_logprobs(
    kind: str, options: dict[str, object], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, and every metric, of a run that computes `old_logprobs` beforehand."""
    evaluated: list[BatchKwargs] = []
    evaluate = LlamaModel.logprobs

    def recorded(model: LlamaModel, batch: BatchKwargs) -> torch.Tensor:
        evaluated.append(batch)
        return evaluate(model, batch)

    def run(**more: object) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        loss = f"type: {kind}, rollout_correction: {{high: 1.00001}}, kl: {{coefficient: 0.1}}"
        chosen = {"phases.1.max_tokens_per_micro_batch": 10000, **options, **more}
        config = tiny(
            f"phases.1.losses={{policy: {{{loss}}}}}",
            *(f"{key}={value}" for key, value in chosen.items()),
        )
        context = build_context(config, processes=processes_of(config))  # with its micro-sequences
        phase = begin_phase(config, 1, context)
        metrics = [phase.step().metrics for _ in range(2)]
        return context.model.module.state_dict(), metrics

    options = dict(options)
    monkeypatch.setattr(LlamaModel, "logprobs", recorded)
    weights, metrics = run()
    # The reference takes one for every mini-batch.
    references = 2 * int(str(options["phases.1.mini_batches"]))
    assert len(evaluated) == 2 * passes + references
    options.pop("phases.1.losses.policy.on_policy", None)
    with monkeypatch.context() as patch:
        patch.setattr(Phase, "_gives_old", lambda self, epochs: False)
        expected_weights, expected = run()
    assert len(evaluated) == 2 * passes + references + 2 * references
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-12)
    for step, expected_step in zip(metrics, expected, strict=True):
        assert step == pytest.approx(expected_step, rel=1e-9, abs=1e-12)


def test_the_samplers_logprobs_may_be_the_old_ones() -> None:
    config, context = tiny_context(
        "phases.1.rollouts.old_logprobs=sampler", "phases.1.mini_batches=1"
    )
    metrics = begin_phase(config, 1, context).step().metrics
    assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-6)  # kept in fp32
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-6)


def test_updates_follow_the_schedule() -> None:
    config, context = tiny_context(
        "phases.1.epochs=3",
        "phases.1.steps=2",
        "phases.1.optimizer.schedule=linear",
        "phases.1.optimizer.learning_rate=0.12",
    )
    phase = begin_phase(config, 1, context)
    rates = [phase.step().metrics["learning_rate"] for _ in range(2)]
    # 12 updates, of which a step makes 6: the mean of 0.12 (1 - n / 12).
    assert rates == pytest.approx([0.12 * (1 - 2.5 / 12), 0.12 * (1 - 8.5 / 12)])


def test_a_kl_term_pulls_to_the_policy_at_the_phases_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    kl = "phases.1.losses={policy: {type: grpo, kl: {coefficient: 0.5}}}"
    config, context = tiny_context(kl)
    before = {name: weight.clone() for name, weight in context.model.module.state_dict().items()}
    phase = begin_phase(config, 1, context)
    models: list[LlamaModel] = []
    evaluated = LlamaModel.logprobs

    def recorded(model: LlamaModel, batch: BatchKwargs) -> torch.Tensor:
        models.append(model)
        return evaluated(model, batch)

    monkeypatch.setattr(LlamaModel, "logprobs", recorded)
    first, second = phase.step(), phase.step()
    assert isinstance(phase.reference, LlamaModel)
    assert phase.reference in models
    torch.testing.assert_close(phase.reference.module.state_dict(), before, rtol=0, atol=0)
    assert all(not parameter.requires_grad for parameter in phase.reference.module.parameters())
    assert second.metrics["policy/kl_ref"] > first.metrics["policy/kl_ref"] > 0


def test_groups_of_equal_rewards_are_dropped_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    config, context = tiny_context(
        "phases.1.advantage.zero_variance=drop", "phases.1.mini_batches=1"
    )
    _give_rewards(context, monkeypatch, [1.0, 0.0, 0.0, 0.0] + [0.25] * 4 * 5)
    result = begin_phase(config, 1, context).step()
    assert result.metrics["active_groups"] == pytest.approx(1 / 6)
    assert result.metrics["reward"] == pytest.approx((1 + 0.25 * 20) / 24)
    assert result.num_tokens <= 4 * (7 + 3)
    assert result.metrics["policy/documents"] == pytest.approx(4)


def test_a_step_without_anything_to_learn_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config, context = tiny_context("phases.1.advantage.zero_variance=drop")
    _give_rewards(context, monkeypatch, [0.0] * 6 * 4)
    before = {name: weight.clone() for name, weight in context.model.module.state_dict().items()}
    result = begin_phase(config, 1, context).step()
    assert result.metrics["reward"] == 0
    assert "loss" not in result.metrics
    torch.testing.assert_close(context.model.module.state_dict(), before, rtol=0, atol=0)
