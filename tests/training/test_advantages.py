"""Advantages of a run: the divergence in rewards, greedy baselines, sums of squares, clamps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.config import ConfigError, UserError
from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document
from fastrl.data.reward_kl import with_kl_in_rewards
from fastrl.data.rollouts import read_rollouts, write_rollouts
from fastrl.data.step import OptimizerStep
from fastrl.training.advantages import with_advantages
from fastrl.training.environment import Scores
from fastrl.training.phases import Phase
from fastrl.training.trainer_state import TrainerState
from tests.helpers.runs import begin_phase, tiny, tiny_context

ADVANTAGE = "phases.1.advantage"
KL = "kl_in_reward={coefficient: 0.2, adaptive: {target: 0.02, horizon: 200}}"


def begin(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Phase:
    """A phase whose groups of 4 have the rewards 0, 1, 2, 3, and greedy answers 0.5."""
    config, context = tiny_context("phases.1.mini_batches=1", *overrides)
    assert context.environment is not None

    def score(problems: Any, answers: Any) -> Scores:
        rewards = [float(number % 4) for number in range(len(answers))]
        return Scores([0.5] * 6 if len(answers) == 6 else rewards, {})

    monkeypatch.setattr(context.environment, "score", score)
    context.generator.manual_seed(1)
    return begin_phase(config, 1, context)


def reference_logprobs(phase: Phase, document: Document) -> list[float]:
    """[labels] of the reference, of the document alone."""
    assert phase.reference is not None
    plain = Document(document.tokens, document.prompt_length, group_id=0)
    step = OptimizerStep([TokenBatch.from_documents([plain])])
    (batch,) = step
    values = phase.reference.logprobs(batch)[batch.labels != -100]
    return values.tolist()


def move(phase: Phase) -> None:
    with torch.no_grad():
        for parameter in phase._context.model.module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


@pytest.mark.parametrize("cut", ["phases.1.max_tokens_per_micro_batch=11", "seed=3"])
def test_rewards_pay_for_the_divergence(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    phase = begin(monkeypatch, f"{ADVANTAGE}.{KL}", f"{ADVANTAGE}.scale=none", cut)
    move(phase)
    rollouts = phase.source.next(phase.reward_kl)
    documents = [
        replace(document, ref_logprobs=reference_logprobs(phase, document), advantage=None)
        for document in rollouts.documents
    ]
    paid = [document.reward or 0.0 for document in with_kl_in_rewards(documents, 0.2)]
    for number, document in enumerate(rollouts.documents):
        group = paid[number // 4 * 4 : number // 4 * 4 + 4]
        assert document.advantage == pytest.approx(paid[number] - sum(group) / 4, abs=1e-9)
        assert document.reward == number % 4
    tokens = [
        old - new
        for document in documents
        for old, new in zip(document.logprobs or (), document.ref_logprobs or (), strict=True)
    ]
    kl = sum(tokens) / len(tokens)
    assert rollouts.metrics["reward_kl"] == pytest.approx(kl, abs=1e-9)
    assert rollouts.metrics["reward_kl_coefficient"] == 0.2
    assert phase.reward_kl is not None
    factor = 1 + min(max(kl / 0.02 - 1, -0.2), 0.2) * 24 / 200
    assert phase.reward_kl.coefficient.value == pytest.approx(0.2 * factor, rel=1e-6)


def test_the_divergence_to_come_is_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    kl = f"{ADVANTAGE}.kl_in_reward={{coefficient: 0.2, level: token, clamp: 0.05}}"
    phase = begin(monkeypatch, kl, f"{ADVANTAGE}.preset=reinforce_plus_plus")
    move(phase)
    assert isinstance(phase.step().metrics["policy/loss"], float)
    for whiten in ("none", "tokens"):
        preset = f"{ADVANTAGE}={{preset: reinforce_plus_plus, whiten: {whiten}}}"
        phase = begin(monkeypatch, preset, kl)
        move(phase)
        documents = phase.source.next(phase.reward_kl).documents
        expected = []
        for number, document in enumerate(documents):
            reference = reference_logprobs(phase, document)
            kls = [
                min(max(old - new, -0.05), 0.05)
                for old, new in zip(document.logprobs or (), reference, strict=True)
            ]
            expected += [number % 4 - 0.2 * sum(kls[t:]) for t in range(len(kls))]
        if whiten == "tokens":
            values = torch.tensor(expected, dtype=torch.float64)
            expected = ((values - values.mean()) / (values.std() + 1e-4)).tolist()
        found = [a for doc in documents for a in doc.advantage[doc.prompt_length :]]  # type: ignore
        assert found == pytest.approx(expected, abs=1e-8)


def test_a_step_with_the_divergence_in_rewards_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = (
        "phases.1.losses={policy: {type: grpo,"
        " kl: {coefficient: 0.1, adaptive: {target: 1, horizon: 48}}}}"
    )
    phase = begin(monkeypatch, f"{ADVANTAGE}.{KL}", loss)
    first, second = phase.step().metrics, phase.step().metrics
    assert first["policy/kl_coefficient_max"] == 0.1
    assert second["policy/kl_coefficient_max"] == pytest.approx(0.1 * (1 - 0.2 * 0.5))
    assert second["policy/kl_ref"] > 0
    state = phase.state(TrainerState())
    assert set(state.kl_coefficients) == {"losses.policy.kl", "advantage.kl_in_reward"}
    other = begin(monkeypatch, f"{ADVANTAGE}.{KL}", loss)
    other.restore(replace(state, phase_step=2))
    assert other.state(TrainerState()).kl_coefficients == state.kl_coefficients
    with pytest.raises(UserError, match=r"checkpoint: `kl_coefficients` must be of \['adva"):
        other.restore(replace(state, kl_coefficients={}))


def test_the_greedy_answer_is_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = begin(monkeypatch, f"{ADVANTAGE}.preset=remax").source.next()
    assert [document.advantage for document in rollouts.documents[:4]] == [-0.5, 0.5, 1.5, 2.5]
    assert rollouts.metrics["greedy_reward"] == 0.5
    one = begin(monkeypatch, f"{ADVANTAGE}.preset=remax", "phases.1.rollouts.group_size=1")
    assert len(one.source.next().documents) == 6


def test_the_sampler_gives_sums_of_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = begin(monkeypatch, f"{ADVANTAGE}.preset=optimal_token")
    document = phase.source.next().documents[5]
    model = phase._context.model
    model.module.eval()
    statistics: list[float] = []
    for end in range(document.prompt_length or 0, len(document.tokens)):
        plain = Document([*document.tokens[:end], 0], prompt_length=end)
        (batch,) = OptimizerStep([TokenBatch.from_documents([plain])])
        total = 0.0
        for token in range(model.limits.vocab_size):
            labels = torch.where(batch.labels == -100, -100, token)
            logprobs = model.module(batch.replace(labels=labels)).logprobs
            total += logprobs[end - 1].exp().item() ** 2
        statistics.append(total)
    assert document.sum_squares == pytest.approx(statistics, rel=1e-5)
    assert len(document.advantage) == len(document.tokens)  # type: ignore[arg-type]


def test_rewards_and_advantages_are_clamped() -> None:
    documents = [Document([1, 2], 1, reward=reward, group_id=0) for reward in (-9.0, 0.0, 5.0)]
    config = tiny(f"{ADVANTAGE}={{scale: none, reward_clamp: [-1, 2], clamp: [-1, 1]}}").phases[1]
    found, _ = with_advantages(documents, config.advantage)  # type: ignore[union-attr]
    mean = 1 / 3
    assert [doc.advantage for doc in found] == pytest.approx([-1.0, -mean, 1.0])
    assert [doc.reward for doc in found] == [-9.0, 0.0, 5.0]


def _file(tmp_path: Path, records: list[dict[str, Any]]) -> str:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def _records(**changes: Any) -> list[dict[str, Any]]:
    record = {"tokens": [1, 2, 3], "prompt_length": 1, "logprobs": [-1.0, -1.0], "group_id": 0}
    return [record | {"right": right, "form": 0.5} | changes for right in (1.0, 0.0, None)]


def _files_phase(path: str, *overrides: str) -> Phase:
    rollouts = {"type": "files", "paths": [path], "documents_per_step": 3}
    config, context = tiny_context(f"phases.1.rollouts={json.dumps(rollouts)}", *overrides)
    return begin_phase(config, 1, context)


GDPO = (f"{ADVANTAGE}.preset=gdpo", "phases.1.rollouts.reward_columns={right: 1, form: 0.5}")


def test_files_with_several_rewards(tmp_path: Path) -> None:
    step = _files_phase(_file(tmp_path, _records()), *GDPO).source.next()
    scale = (0.5 / (0.5**0.5 + 1e-4)) / ((0.5 / (0.5**0.5 + 1e-4)) * 2**0.5 + 1e-4)
    assert [doc.advantage for doc in step.documents] == pytest.approx([scale, -scale])
    assert step.documents[0].rewards == {"right": 1.0, "form": 0.5}


def test_files_lack_what_the_baseline_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"document 1: `greedy_reward` is required with `advantage"):
        _files_phase(
            _file(tmp_path, _records(reward=1.0)),
            f"{ADVANTAGE}.preset=remax",
            "phases.1.rollouts.ignore=[right, form]",
        )
    with pytest.raises(UserError, match=r"`ref_logprobs` is required, got none"):
        _files_phase(
            _file(tmp_path, _records(reward=1.0)),
            f"{ADVANTAGE}.{KL}",
            "phases.1.rollouts.ignore=[right, form]",
        )
    with pytest.raises(UserError, match=r"`advantage.clamp` must not be given, as all documents"):
        _files_phase(
            _file(tmp_path, _records(advantage=1.0)),
            f"{ADVANTAGE}.clamp=[-1, 1]",
            "phases.1.rollouts.ignore=[right, form]",
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{ADVANTAGE}.preset=gdpo"],
            "must go with `rollouts` of type `files` and",
        ),
        (
            ["phases.1.rollouts.group_size=1"],
            "`rollouts.group_size` must be at least 2 with",
        ),
        (
            [f"{ADVANTAGE}.pass_at=5"],
            "`advantage.pass_at` must be at most `rollouts.group",
        ),
        (
            [
                "model.head.metrics=false",
                "phases.1.losses={policy: {type: grpo,"
                " kl: {coefficient: 1, adaptive: {target: 1, horizon: 9}}}}",
            ],
            "`kl.adaptive` needs `model.head.metrics: true`",
        ),
        (
            [
                "phases.1.losses={policy: {type: grpo, kl: {coefficient: 1, clamp: 1,"
                " gradient: straight_through}}}"
            ],
            "`clamp` has no effect on the gradient with `gradient: straight_through`",
        ),
    ],
)
def test_what_has_no_effect_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(*overrides)
    assert message in str(caught.value)


def test_new_columns_go_through_files(tmp_path: Path) -> None:
    document = Document(
        [1, 2, 3],
        prompt_length=1,
        reward=1.0,
        group_id=0,
        rewards={"right": 1.0, "form": 0.5},
        greedy_reward=0.25,
        sum_squares=[0.5, 0.25],
    )
    for name in ("a.jsonl", "a.parquet"):
        write_rollouts(tmp_path / name, [document])
        (read,) = read_rollouts(tmp_path / name, require=())
        assert (read.rewards, read.greedy_reward) == (document.rewards, 0.25)
        assert read.sum_squares == [0.5, 0.25]
