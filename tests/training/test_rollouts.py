"""Rollouts from files, and how documents become the updates of a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastrl import TokenBatch
from fastrl.config import UserError
from fastrl.config.rollouts import FileRolloutsConfig
from fastrl.data.documents import Document
from fastrl.data.rollouts import write_rollouts
from fastrl.training.file_rollouts import RolloutFiles
from fastrl.training.phases import Phase
from fastrl.training.rollout_sources import build_sources
from fastrl.training.rollouts import Rollouts, split_groups
from fastrl.training.run import train
from tests.helpers.runs import begin_phase, tiny, tiny_context


def _documents(num_groups: int = 4) -> list[Document]:
    return [
        Document(
            tokens=[1, 2, group + 3, answer + 1, 0],
            prompt_length=3,
            logprobs=[-0.5, -0.25],
            reward=float(answer == 0) if group else 1.0,
            group_id=group,
        )
        for group in range(num_groups)
        for answer in range(3)
    ]


def _phase(paths: list[Path], *overrides: str) -> Phase:
    rollouts = json.dumps({"type": "files", "paths": [str(path) for path in paths]})
    config, context = tiny_context(
        "environment.heldout_prompts=1", f"phases.1.rollouts={rollouts}", *overrides
    )
    return begin_phase(config, 1, context)


def _steps(phase: Phase, number: int) -> list[Rollouts]:
    return [phase.source.next() for _ in range(number)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_step_takes_whole_groups_and_all_come_before_any_again(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"rollouts{suffix}"
    write_rollouts(path, _documents())
    phase = _phase([path], "phases.1.rollouts.documents_per_step=5")
    steps = _steps(phase, 2)
    assert [len(step.documents) for step in steps] == [6, 6]
    prompts = [document.tokens[2] for step in steps for document in step.documents]
    assert sorted(prompts) == [3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]
    assert prompts != sorted(prompts)
    for step in steps:
        ids = [document.group_id for document in step.documents]
        assert ids == [0, 0, 0, 1, 1, 1]


def test_rewards_become_advantages_in_their_group(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, _documents())
    phase = _phase(
        [path], "phases.1.rollouts.documents_per_step=12", "phases.1.advantage.scale=none"
    )
    (step,) = _steps(phase, 1)
    assert step.metrics["reward"] == pytest.approx(6 / 12)
    assert step.metrics["active_groups"] == pytest.approx(3 / 4)
    for document in step.documents:
        expected = [0, 0, 0] if document.tokens[2] == 3 else [2 / 3, -1 / 3, -1 / 3]
        assert document.advantage == pytest.approx(expected[document.tokens[3] - 1])


def test_advantages_of_the_file_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(
        path,
        [
            replace(document, advantage=0.125 * number, reward=None, group_id=None)
            for number, document in enumerate(_documents())
        ],
    )
    (step,) = _steps(_phase([path], "phases.1.rollouts.documents_per_step=12"), 1)
    assert sorted(float(str(d.advantage)) for d in step.documents) == [0.125 * n for n in range(12)]
    assert "reward" not in step.metrics


@pytest.mark.parametrize("masked", [False, True])
def test_a21_answers_to_a_prompt_in_two_files_are_one_group(tmp_path: Path, masked: bool) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    layout: dict[str, Any] = {"prompt_length": 2}
    if masked:
        layout = {"prompt_length": None, "loss_mask": [0, 0, 1, 1], "logprobs": [-1.0] * 4}
    documents = [
        replace(document, tokens=[1, 2, reward, 0], reward=float(reward), group_id=0, **layout)
        for reward, document in zip((1, 0), _documents(), strict=False)
    ]
    for path, document in zip(paths, documents, strict=True):
        write_rollouts(path, [document])
    (step,) = _steps(_phase(paths, "phases.1.rollouts.documents_per_step=2"), 1)
    assert [document.group_id for document in step.documents] == [0, 0]
    assert [document.advantage for document in step.documents] == pytest.approx(
        [0.7070, -0.7070], abs=1e-4
    )


def test_groups_of_other_prompts_and_of_no_id_stay_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    write_rollouts(paths[0], _documents(1))
    others = [replace(document, tokens=[2, *document.tokens[1:]]) for document in _documents(1)]
    write_rollouts(paths[1], others)
    (step,) = _steps(_phase(paths, "phases.1.rollouts.documents_per_step=6"), 1)
    assert [document.group_id for document in step.documents] == [0, 0, 0, 1, 1, 1]
    for path in paths:
        write_rollouts(path, [replace(_documents()[0], group_id=None, advantage=1.0)])
    (step,) = _steps(_phase(paths, "phases.1.rollouts.documents_per_step=2"), 1)
    assert [document.group_id for document in step.documents] == [0, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tokens": [1, 2', "rollouts.jsonl, line 2: must be a JSON object"),
        ({"advantage": None}, "rollouts.jsonl, line 2: `advantage` "),
        ({"logprobs": None}, "rollouts.jsonl, line 2: `logprobs` "),
        ({"logprobs": [-0.5]}, "rollouts.jsonl, line 2: `logprobs` "),
        ({"tokens": [1, 15, 2, 3, 0]}, "`tokens` must be ids below the vocabulary size 15, got 15"),
    ],
)
def test_a_line_that_does_not_serve_is_named(
    tmp_path: Path, line: str | dict[str, Any], message: str
) -> None:
    good = {"tokens": [1, 2, 3, 4, 0], "prompt_length": 3, "logprobs": [-0.5, -0.25]}
    good |= {"advantage": 1.0}
    lines = [json.dumps(good), line if isinstance(line, str) else json.dumps(good | line)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        _phase([path])
    assert message in str(caught.value)


def test_a_loss_names_what_the_files_must_have(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [replace(d, logprobs=None) for d in _documents()])
    _phase([path], "phases.1.losses={policy: {type: reinforce}}")
    with pytest.raises(UserError, match="`logprobs`"):
        _phase([path])
    write_rollouts(path, _documents())
    with pytest.raises(UserError, match="`ref_logprobs`"):
        _phase([path], "phases.1.losses={policy: {type: grpo, kl: {coefficient: 0.1}}}")


def test_a_column_is_in_all_documents_or_in_none(tmp_path: Path) -> None:
    """Ranks whose documents differ in it would compute different metrics."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_rollouts(first, _documents())
    write_rollouts(second, [replace(d, rollout_logprobs=d.logprobs) for d in _documents()])
    message = r"first.jsonl, document 1: `rollout_logprobs` is .* as \S+second.jsonl, document 1"
    with pytest.raises(UserError, match=message):
        _phase([first, second])


def test_a_file_of_several_phases_is_opened_once_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, _documents())
    opened = []
    open_path = Path.open

    def counted(self: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(self)
        return open_path(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", counted)
    files = f"rollouts: {{type: files, paths: [{path}], documents_per_step: 3}}"
    phases = ", ".join(
        f"{{type: rl, name: {name}, steps: 2, losses: {{policy: {{type: {name}}}}}, {files}}}"
        for name in ("grpo", "gspo")
    )
    assert train(tiny(f"phases=[{phases}]"), tmp_path / "run") == 0
    assert opened.count(path) == 1


def test_phases_share_the_documents_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, _documents(1))
    files = f"rollouts: {{type: files, paths: [{path}], documents_per_step: 3}}"
    losses = ("{type: grpo}", "{type: cispo}", "{type: reinforce}")
    phases = ", ".join(
        f"{{type: rl, steps: 1, losses: {{policy: {loss}}}, {files}}}" for loss in losses
    )
    config, context = tiny_context(f"phases=[{phases}]")
    sources = build_sources(config, context)
    first, second, other = (sources[index].items.take(1)[0] for index in range(3))
    assert len(first) == 3
    assert all(a is b for a, b in zip(first, second, strict=True))
    # It asks for less of the file, and is read with that.
    assert not any(a is b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("splits", [False, True], ids=["tokens", "completion_ids"])
@pytest.mark.parametrize("given", [[], ["ref_logprobs"]])
def test_a23_a_completion_of_no_token_has_empty_lists(
    tmp_path: Path, splits: bool, given: list[str]
) -> None:
    """Its reward counts in the baseline; whether a loss reads a list or not changes nothing."""
    names = ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")
    records = []
    for answer, reward in (([3, 0], 1.0), ([4, 0], 0.0), ([], 0.0)):
        logprobs = [-0.5] * len(answer)
        record: dict[str, Any] = {"reward": reward, "group_id": 0}
        if splits:
            record |= {"prompt_ids": [1, 2], "completion_ids": answer}
        else:
            record |= {"tokens": [1, 2, *answer], "prompt_length": 2}
            names = ("logprobs", "rollout_logprobs", "ref_logprobs")
        records.append(json.dumps(record | dict.fromkeys(names, logprobs)) + "\n")
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(records), encoding="utf-8")
    loss = {"type": "grpo", "kl": {"coefficient": 0.1}} if given else {"type": "grpo"}
    phase = _phase(
        [path],
        f"phases.1.losses={json.dumps({'policy': loss})}",
        "phases.1.rollouts.documents_per_step=3",
        "phases.1.advantage.scale=none",
    )
    (step,) = _steps(phase, 1)
    assert [document.advantage for document in step.documents] == pytest.approx([2 / 3, -1 / 3])
    assert step.metrics["reward"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "change",
    [{"reward": None}, {"prompt_length": 5, "logprobs": []}],
    ids=["unscored", "without labels"],
)
def test_rl24_files_that_teach_nothing_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path, other = tmp_path / "rollouts.jsonl", tmp_path / "other.jsonl"
    write_rollouts(path, [replace(document, **change) for document in _documents()])
    with pytest.raises(UserError, match=r"rollouts.jsonl: at least one document must have a label"):
        _phase([path])
    write_rollouts(other, _documents(1))
    _phase([path, other])


def test_an_empty_file_has_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="no documents"):
        _phase([path])


@pytest.mark.parametrize(
    ("index", "longest"), [(0, 7 + 3), (1, 7 + 3)], ids=["supervised", "sampler"]
)
def test_documents_that_may_be_longer_than_a_micro_batch_are_refused(
    index: int, longest: int
) -> None:
    key = f"phases.{index}.max_tokens_per_micro_batch"
    config, context = tiny_context("environment.heldout_prompts=1", f"{key}={longest}")
    begin_phase(config, index, context)
    config, context = tiny_context("environment.heldout_prompts=1", f"{key}={longest - 1}")
    with pytest.raises(UserError, match=f"`{key}` must be at least {longest}"):
        begin_phase(config, index, context)


def test_a_document_longer_than_a_micro_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, _documents())
    _phase([path], "phases.1.max_tokens_per_micro_batch=5")
    with pytest.raises(UserError, match=r"`phases.1.max_tokens_\w+` must be at least 5"):
        _phase([path], "phases.1.max_tokens_per_micro_batch=4")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("max_position_embeddings", ()),
        ("sliding_window", ("model.architecture=mistral",)),
    ],
)
def test_a_document_longer_than_the_model_takes_is_refused(
    name: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, _documents())
    _phase([path], f"model.{name}=5", *options)
    message = f"`{name}` of the `model` must be at least 5, the most tokens that a document of"
    with pytest.raises(UserError, match=message):
        _phase([path], f"model.{name}=4", *options)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 9])
def test_updates_have_whole_groups(parts: int) -> None:
    documents = _documents()
    split = split_groups(documents, parts)
    assert [document for part in split for document in part] == documents
    assert len(split) == min(parts, 4)
    ids = [{document.group_id for document in part} for part in split]
    assert sum(len(group) for group in ids) == 4
    assert max(len(group) for group in ids) - min(len(group) for group in ids) <= 1


def test_documents_without_a_group_are_split_like_groups_of_one() -> None:
    documents = [replace(document, group_id=None) for document in _documents()]
    assert [len(part) for part in split_groups(documents, 4)] == [3, 3, 3, 3]
    assert split_groups(documents, 12) == [[document] for document in documents]


@pytest.mark.parametrize("zero_variance", ["keep", "drop"])
def test_a_document_of_a_mask_without_labels_is_left_out(
    tmp_path: Path, zero_variance: str
) -> None:
    path = tmp_path / "rollouts.jsonl"
    masks = ([0, 0, 1], [1, 0, 0], [0, 0, 0])
    common = {"tokens": [1, 2, 3], "logprobs": [0.0, -1.0, -1.0], "advantage": 1.0}
    lines = [json.dumps(common | {"loss_mask": mask}) + "\n" for mask in masks]
    path.write_text("".join(lines), encoding="utf-8")
    phase = _phase(
        [path],
        "phases.1.rollouts.documents_per_step=3",
        f"phases.1.advantage.zero_variance={zero_variance}",
    )
    (step,) = _steps(phase, 1)
    assert [np.asarray(doc.loss_mask).tolist() for doc in step.documents] == [[0, 0, 1]]
    assert step.metrics["active_groups"] == pytest.approx(1 / 3)


def test_documents_of_files_are_held_as_arrays_of_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    documents = [replace(doc, logprobs=[-0.1, -0.7]) for doc in _documents(1)]
    values: dict[str, Any] = {
        "logprobs": [-0.1] * 5,
        "advantage": [0.1] * 5,
        "ref_logprobs": [-0.3] * 5,
    }
    documents.append(Document([5, 4, 3, 2, 1], loss_mask=[0, 1, 0, 1, 1], **values))
    write_rollouts(path, documents)
    held = RolloutFiles(9).documents(str(path), ("logprobs",), FileRolloutsConfig(paths=("a",)))
    for one, given in zip(held, documents, strict=True):
        assert isinstance(one.tokens, np.ndarray)
        assert isinstance(one.logprobs, np.ndarray)
        got, expected = (TokenBatch.from_documents([doc]) for doc in (one, given))
        assert torch.equal(got.tokens, expected.tokens)
        assert torch.equal(got.labels, expected.labels)
        for name, column in expected.columns.items():
            assert got.columns[name].dtype == torch.float32
            assert torch.equal(got.columns[name], column)


def test_a_pattern_of_a_run_stands_for_its_files(tmp_path: Path) -> None:
    for number, document in enumerate(_documents(2)):
        write_rollouts(tmp_path / f"{number}.jsonl.gz", [document])
    pattern = json.dumps({"type": "files", "paths": [str(tmp_path / "*.gz")]})
    config, context = tiny_context(
        "environment.heldout_prompts=1",
        f"phases.1.rollouts={pattern}",
        "phases.1.rollouts.documents_per_step=6",
    )
    (step,) = _steps(begin_phase(config, 1, context), 1)
    assert len(step.documents) == 6


def test_a_reward_of_several_rows_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole, *others = _documents(1)
    parts = [replace(whole, reward=4.0, rollout_id="r"), replace(whole, rollout_id="r", reward=4.0)]
    write_rollouts(path, [*parts, *(replace(other, reward=1.0) for other in others)])
    (step,) = _steps(_phase([path], "phases.1.rollouts.documents_per_step=4"), 1)
    assert step.metrics["reward"] == pytest.approx(2.0)
    advantages = sorted(float(np.asarray(document.advantage)) for document in step.documents)
    assert advantages[2] == advantages[3] > 0
    assert sum(advantages[:3]) == pytest.approx(0.0)
