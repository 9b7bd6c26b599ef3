"""Training from teachers: on the policy's own tokens, from recorded entries, and in streams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastrl import Document
from fastrl.config import UserError
from fastrl.data.rollouts import write_rollouts
from fastrl.models.checkpoint import save_llama
from fastrl.models.llama import Llama
from fastrl.training.llama_model import LlamaModel
from fastrl.training.rollout_sources import build_sources
from fastrl.training.trainer_state import TrainerState
from tests.helpers.runs import begin_phase, tiny, tiny_context

LOSS = "phases.1.losses={policy: {type: dppo, on_policy_distillation: {rewards: false}}}"
VOCABULARY = 15


def write_teacher(folder: Path, vocab_size: int = VOCABULARY) -> Path:
    """A model of another size."""
    config = tiny().model.model_copy(
        update={"vocab_size": vocab_size, "eos_token_id": 14, "hidden_size": 8}
    )
    torch.manual_seed(7)
    save_llama(Llama(config, dtype=torch.float64), folder)  # type: ignore[arg-type]
    return folder


def test_a_policy_nears_a_teacher_of_another_size_without_rewards(tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher")
    config, context = tiny_context(
        LOSS,
        f"phases.1.reference.path={folder}",
        "phases.1.steps=12",
        "phases.1.mini_batches=1",
        "phases.1.rollouts.prompts_per_step=24",
        "phases.1.optimizer.learning_rate=2e-2",
    )
    phase = begin_phase(config, 1, context)
    assert isinstance(phase.reference, LlamaModel)
    assert phase.reference.module.config.hidden_size == 8
    divergences = [phase.step().metrics["policy/kl_ref"] for _ in range(12)]
    assert sum(divergences[-3:]) < 0.6 * sum(divergences[:3])
    state = phase.state(TrainerState())
    assert state.reference is None  # the folder holds it
    begin_phase(config, 1, context).restore(state)


def test_folders_that_are_no_reference_are_refused(tmp_path: Path) -> None:
    config, context = tiny_context(LOSS, f"phases.1.reference.path={tmp_path / 'none'}")
    with pytest.raises(UserError, match="a reference must be a folder with config"):
        build_sources(config, context)
    folder = write_teacher(tmp_path / "teacher", vocab_size=16)
    config, context = tiny_context(LOSS, f"phases.1.reference.path={folder}")
    with pytest.raises(UserError, match="`vocab_size` of a reference must be the model's 15, got"):
        build_sources(config, context)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["phases.1.reference.path=x"], "`phases.1.reference` has no effect"),
        ([LOSS, "phases.1.advantage.scale=none"], "`phases.1.advantage.scale` has no effect"),
        (
            ["phases.1.losses={kd: {type: distillation, recorded: true}}"],
            "`phases.1` must have a policy-gradient loss .* a `distillation` that is `recorded`",
        ),
        (
            ["phases.1.losses={p: {type: grpo}, kd: {type: distillation, recorded: true}}"],
            "needs `teacher_tokens`, in a phase of type `rl` with `rollouts` of type `sampler`;",
        ),
        (
            ["phases.1.losses={p: {type: grpo, stream: rl}}"],
            "needs `rl_weights`, in a phase .*; `rollouts` of type `files` can have it;",
        ),
        (["phases.0.losses={p: {type: cross_entropy, stream: ce}}"], "needs `ce_weights`, in a"),
    ],
)
def test_what_has_no_data_or_no_effect_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny(*overrides)


DOCUMENT = Document(
    [1, 2, 3, 0],
    prompt_length=2,
    teacher_ids=[[3, 1], [0]],
    teacher_logprobs=[[-0.2, -2.5], [-0.1]],
)


def files_phase(path: Path, losses: str, steps: int = 1) -> str:
    rollouts = f"rollouts: {{type: files, paths: [{path}], documents_per_step: 2}}"
    optimizer = "optimizer: {learning_rate: 3e-2}"
    return f"phases=[{{type: rl, steps: {steps}, {rollouts}, {optimizer}, losses: {losses}}}]"


def test_recorded_teachers_need_no_rewards(tmp_path: Path) -> None:
    path = tmp_path / "teacher.jsonl"
    write_rollouts(path, [DOCUMENT, replace(DOCUMENT, reward=None, group_id=1)])
    losses = "{kd: {type: distillation, recorded: true}}"
    config, context = tiny_context(files_phase(path, losses, steps=20))
    phase = begin_phase(config, 0, context)
    divergences = [phase.step().metrics["kd/divergence"] for _ in range(20)]
    assert divergences[-1] < 0.3 * divergences[0]
    bare = replace(DOCUMENT, teacher_ids=None, teacher_logprobs=None)
    for documents, message in (
        ([bare], "`teacher_ids` is required with a `distillation` loss that is `recorded`"),
        ([replace(DOCUMENT, teacher_ids=[[3, 99], [0]])], "`teacher_ids` must be ids below .* 99"),
        ([replace(DOCUMENT, prompt_length=4, teacher_ids=[], teacher_logprobs=[])], "a label"),
    ):
        write_rollouts(path, documents)
        config, context = tiny_context(files_phase(path, losses))
        with pytest.raises(UserError, match=message):
            begin_phase(config, 0, context)


def test_streams_of_files_have_their_own_counts(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    rollout = Document(
        [1, 2, 3, 0],
        prompt_length=2,
        logprobs=[-1.0, -2.0],
        advantage=1.0,
        rl_weight=1.0,
        ce_weight=0.0,
    )
    text = replace(rollout, logprobs=[0.0, 0.0], advantage=0.0, rl_weight=0.0, ce_weight=[0, 2.0])
    losses = "{policy: {type: grpo, stream: rl}, texts: {type: cross_entropy, stream: ce}}"
    results = []
    for documents in ([rollout, text], [rollout], [text]):
        write_rollouts(path, documents)
        config, context = tiny_context(files_phase(path, losses))
        results.append(begin_phase(config, 0, context).step().metrics)
    both, alone, imitated = results
    assert both["policy/loss"] == pytest.approx(alone["policy/loss"], rel=1e-12)
    assert both["texts/loss"] == pytest.approx(imitated["texts/loss"], rel=1e-12)
    assert both["texts/loss"] == pytest.approx(-2 * both["texts/logprob"], rel=1e-12)
    assert (both["policy/tokens"], alone["texts/loss"]) == (2, 0)
