"""DAPO's soft overlong punishment and its overlong filtering."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastrl.config import ConfigError, UserError
from fastrl.data.documents import Document
from fastrl.data.reward_shaping import completion_length, overlong_punishment
from fastrl.data.rollouts import write_rollouts
from fastrl.training.environment import Scores
from fastrl.training.phases import Phase
from fastrl.training.rollouts import Rollouts
from tests.helpers.runs import begin_phase, tiny, tiny_context


def equation_13(length: int, longest: int, cache: int) -> float:
    """As the paper writes it."""
    if length <= longest - cache:
        return 0.0
    if longest - cache < length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(20480, 4096), (10, 3), (5, 5), (1, 1)])
def test_the_punishment_is_that_of_the_paper(longest: int, cache: int) -> None:
    lengths = {0, 1, longest // 2, longest - cache, longest - cache + 1, longest, longest + 1, 9**9}
    for length in lengths:
        found = overlong_punishment(length, max_length=longest, cache_length=cache)
        assert found == equation_13(length, longest, cache)
    assert overlong_punishment(longest, max_length=longest, cache_length=cache) == -1


def test_what_the_model_wrote_is_counted() -> None:
    assert completion_length(Document([1, 2, 3, 4], prompt_length=1)) == 3
    assert completion_length(Document([1, 2, 3, 4], loss_mask=[0, 1, 0, 1])) == 2


def _sampled(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Rollouts:
    """A step of rollouts with rewards 0, 1, ... of each group, and scale `none`."""
    config, context = tiny_context("phases.1.advantage.scale=none", *overrides)
    assert context.environment is not None
    rewards = [float(number % 4) for number in range(24)]
    scores = Scores(rewards, {})
    monkeypatch.setattr(context.environment, "score", lambda problems, answers: scores)
    context.generator.manual_seed(1)
    return begin_phase(config, 1, context).source.next()


def _lengths(documents: list[Document]) -> list[int]:
    return [completion_length(document) for document in documents]


def test_sampled_completions_are_punished_before_advantages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shaping = "phases.1.advantage.shaping={max_length: 3, cache_length: 2}"
    plain, shaped = _sampled(monkeypatch), _sampled(monkeypatch, shaping)
    lengths = _lengths(plain.documents)
    assert lengths == _lengths(shaped.documents)
    assert len(set(lengths)) > 1
    punishments = [equation_13(length, 3, 2) for length in lengths]
    for start in range(0, 24, 4):
        group = range(start, start + 4)
        rewards = [float(i % 4) + punishments[i] for i in group]
        for i in group:
            expected = rewards[i - start] - sum(rewards) / 4
            assert shaped.documents[i].advantage == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert shaped.metrics["overlong_punishment"] == pytest.approx(sum(punishments) / 24)
    # The reward that is shown is the environment's.
    assert shaped.metrics["reward"] == plain.metrics["reward"] == 1.5
    assert "overlong_punishment" not in plain.metrics


def test_by_default_the_samplers_bound_is_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    default = _sampled(monkeypatch, "phases.1.advantage.shaping={type: overlong}")
    given = _sampled(monkeypatch, "phases.1.advantage.shaping={max_length: 3, cache_length: 1}")
    assert default.metrics == given.metrics
    assert default.metrics["overlong_punishment"] < 0


def test_truncated_completions_can_be_left_out_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _sampled(monkeypatch)
    dropped = _sampled(monkeypatch, "phases.1.advantage.truncated=drop")
    ended = [document for document in kept.documents if document.tokens[-1] == 0]
    assert 0 < len(ended) < 24
    assert dropped.documents == ended  # with the same advantages
    assert dropped.metrics["reward"] == kept.metrics["reward"]


def _file(path: Path, *, with_advantages: bool = False) -> list[Document]:
    documents = [
        Document(
            tokens=[1, 2, *[3] * length],
            prompt_length=2,
            logprobs=[-0.5] * length,
            reward=float(length % 2),
            advantage=1.0 if with_advantages else None,
            group_id=None if with_advantages else 0,
        )
        for length in (1, 2, 5, 6)
    ]
    write_rollouts(path, documents)
    return documents


def _phase(path: Path, *overrides: str) -> Phase:
    rollouts = json.dumps({"type": "files", "paths": [str(path)], "documents_per_step": 4})
    config, context = tiny_context(
        "environment.heldout_prompts=1",
        f"phases.1.rollouts={rollouts}",
        "phases.1.advantage.scale=none",
        *overrides,
    )
    return begin_phase(config, 1, context)


SHAPING = "phases.1.advantage.shaping={max_length: 5, cache_length: 4}"


def test_completions_of_files_are_punished_too(tmp_path: Path) -> None:
    documents = _file(tmp_path / "rollouts.jsonl")
    step = _phase(tmp_path / "rollouts.jsonl", SHAPING).source.next()
    rewards = [float(len(d.tokens) % 2) + equation_13(len(d.tokens) - 2, 5, 4) for d in documents]
    assert rewards == [1, -0.25, 0, -1]
    found = [document.advantage for document in step.documents]
    assert found == pytest.approx([reward - sum(rewards) / 4 for reward in rewards])
    assert step.metrics["reward"] == 0.5
    assert step.metrics["overlong_punishment"] == pytest.approx((0 - 0.25 - 1 - 1) / 4)


def test_an_unscored_document_stays_unscored(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    first, *rest = _file(path)
    write_rollouts(path, [replace(first, reward=None), *rest])
    step = _phase(path, SHAPING).source.next()
    assert len(step.documents) == 3


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    _file(path, with_advantages=True)
    _phase(path)
    with pytest.raises(UserError, match=r"`advantage\.shaping` must not be given, as all"):
        _phase(path, SHAPING)
    with pytest.raises(ConfigError, match=r"`phases\.1\.advantage\.truncated` must be `keep` with"):
        _phase(path, "phases.1.advantage.truncated=drop")
    with pytest.raises(ConfigError, match=r"shaping`: `max_length` is required with `rollouts` of"):
        _phase(path, "phases.1.advantage.shaping={type: overlong}")
    for shaping, message in {
        "{max_length: 3, cache_length: 4}": r"`cache_length` must be at most `max_length` \(3\)",
        "{cache_length: 4}": r"`cache_length` must be at most `max_length` \(3\), got 4",
        "{max_length: 4, cache_length: 1}": r"must be below `sampler.max_new_tokens` \(3\), or no",
    }.items():
        with pytest.raises(ConfigError, match=message):
            tiny(f"phases.1.advantage.shaping={shaping}")
