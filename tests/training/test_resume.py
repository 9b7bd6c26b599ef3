"""`--resume`: it goes on if there is a checkpoint and begins if there is none; logs and inputs."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastrl.cli import main
from fastrl.config import UserError
from fastrl.data.documents import Document
from fastrl.data.rollouts import write_rollouts
from fastrl.training import run as runs
from fastrl.training.evaluate import evaluate
from fastrl.training.interrupt import StopRequest
from fastrl.training.phases import Phase, StepResult
from fastrl.training.resume import with_inputs
from fastrl.training.run import Trainer
from fastrl.training.tokenizer_folder import CHARACTERS_END, character_tokenizer_json
from fastrl.training.trainer_state import TrainerState
from tests.helpers.killed_runs import check_same, lines, score_here
from tests.helpers.runs import FEW_STEPS, final_weights, write_tiny

LOGS = ("metrics.jsonl", "samples.jsonl")
STEP = Phase.step
RUN_PHASE = Trainer._run_phase


class Run:
    """A run of the tiny config in a folder."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.config = str(write_tiny(folder.parent))
        self.overrides = [*FEW_STEPS, *overrides]

    def train(self, *more: str, resume: bool = True) -> int:
        options = ["--resume"] if resume else []
        command = ["train", self.config, "--run-dir", str(self.folder)]
        return main([*command, *options, *self.overrides, *more])

    def go_on_from(self, name: str) -> None:
        """Makes the run one that was stopped at a checkpoint."""
        (self.folder / "checkpoints" / "latest").write_text(f"{name}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that was never stopped; what it scores with stays for the tests of this module."""
    run = Run(tmp_path_factory.mktemp("whole") / "run", "checkpoint.keep=9")
    with pytest.MonkeyPatch.context() as patch:
        score_here(patch)
        assert run.train(resume=False) == 0
        yield run


@pytest.fixture
def run(whole: Run, tmp_path: Path) -> Run:
    """A copy of that run."""
    shutil.copytree(whole.folder, tmp_path / "run")
    return Run(tmp_path / "run", "checkpoint.keep=9")


def _content(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_rl12_a_finished_run_is_left_as_it_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = _content(run.folder)
    for _ in range(2):
        assert run.train() == 0
        assert capsys.readouterr().out == (
            f"rl-000004 is the end of the run in {run.folder}: nothing to do\n"
        )
        assert _content(run.folder) == before


@pytest.mark.parametrize("state", ["missing", "empty", "config", "logs", "half", "locked"])
def test_rl14_resume_begins_where_there_is_no_checkpoint(
    whole: Run, tmp_path: Path, state: str
) -> None:
    run = Run(tmp_path / "run", "checkpoint.keep=9")
    if state != "missing":
        run.folder.mkdir()
    if state in ("config", "logs", "half"):
        shutil.copy(whole.folder / "config.yaml", run.folder)
    if state == "logs":
        for name in LOGS:
            shutil.copy(whole.folder / name, run.folder)
        with (run.folder / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 5, "ph')
    if state == "half":
        (run.folder / "checkpoints" / ".supervised-000001.partial").mkdir(parents=True)
    if state == "locked":
        for name in (".lock", "config.yaml.tmp"):
            (run.folder / name).write_text("", encoding="utf-8")
    assert run.train() == 0
    check_same(run.folder, whole.folder)


def test_rl14_a_start_without_resume_needs_a_new_folder(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    shutil.copy(whole.folder / "config.yaml", run.folder)
    assert run.train(resume=False) == 2
    assert "must be new or empty; " in capsys.readouterr().err
    assert [path.name for path in run.folder.iterdir()] == ["config.yaml"]


def test_rl14_resume_does_not_begin_in_a_folder_of_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    run.folder.write_text("", encoding="utf-8")
    assert run.train() == 2
    assert "run: must be a folder, is a file" in capsys.readouterr().err
    run.folder.unlink()
    run.folder.mkdir()
    (run.folder / "thesis.tex").write_text("mine", encoding="utf-8")
    assert run.train() == 2
    error = capsys.readouterr().err
    assert "must be the folder of a run, or new or empty, but has thesis.tex and no config" in error
    assert [path.name for path in run.folder.iterdir()] == ["thesis.tex"]


def test_rl14_a_first_checkpoint_without_latest_is_gone_on_from(whole: Run, run: Run) -> None:
    for path in (run.folder / "checkpoints").iterdir():
        if path.name == "latest":
            path.unlink()
        elif path.name != "supervised-000001":
            shutil.rmtree(path)
    weights = run.folder / "checkpoints" / "supervised-000001" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert run.train() == 0
    assert weights.stat().st_mtime_ns == before
    check_same(run.folder, whole.folder)


def test_rl14_what_determines_the_result_may_not_change(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _content(run.folder)
    changes = ["seed=9", "phases.1.losses.policy.epsilon_low=0.1", "sampler.max_new_tokens=2"]
    changes += [f"phases.{phase}.optimizer.learning_rate=0.5" for phase in (0, 1)]
    for _ in range(2):
        assert run.train(*changes, "dtype=float32") == 2
        assert capsys.readouterr().err == (
            f"fastrl: error: {run.folder}: a run goes on with the config it began with, which is "
            "config.yaml there; only `parallel`, `device`, `checkpoint`, `logging` (and where "
            "servers are) may be others, but these differ:\n"
            "  `seed`: 3 there, 9 now\n"
            '  `dtype`: "float64" there, "float32" now\n'
            "  `sampler.max_new_tokens`: 3 there, 2 now\n"
            "  `phases.0.optimizer.learning_rate`: 0.01 there, 0.5 now\n"
            "  `phases.1.losses.policy.epsilon_low`: 0.2 there, 0.1 now\n"
            "  and 1 more\n"
        )
        assert _content(run.folder) == before
        # The same without a checkpoint: the folder is that of another run.
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        before = _content(run.folder)


def test_rl14_what_does_not_determine_the_result_may_change(whole: Run, run: Run) -> None:
    run.go_on_from("supervised-000001")
    changes = ["device=cpu", "checkpoint.every=2", "logging.num_samples=1", "checkpoint.keep=1"]
    assert run.train(*changes) == 0
    assert lines(run.folder / "metrics.jsonl") == lines(whole.folder / "metrics.jsonl")
    torch.testing.assert_close(
        final_weights(run.folder), final_weights(whole.folder), rtol=0, atol=0
    )
    names = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert names == {"latest", "rl-000004"}
    assert "num_samples: 1" in (run.folder / "config.yaml").read_text(encoding="utf-8")


BROKEN = {
    "torn": b'{"step": 4, "phase": "rl", "lo',
    "blank": b"\n\n",
    "zeros": bytes(5000),
    "zeros in a line": b'{"step": 4' + bytes(300) + b"\n",
    "not UTF-8": b'{"step": 4, "phase": "\xff\xfe"}\n',
    "without step": b'{"phase": "rl"}\n',
    "a step of text": b'{"step": "4", "phase": "rl"}\n',
    "without phase": b'{"step": 4}\n',
    "no object": b"[4]\n",
    "nested": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_rl4_broken_lines_after_the_checkpoint_are_dropped(
    whole: Run, run: Run, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (whole.folder / name).read_bytes()
    for broken in BROKEN.values():
        run.go_on_from("rl-000003")
        (run.folder / name).write_bytes(content + broken)
        assert run.train() == 0
        assert "no records" not in capsys.readouterr().out
        check_same(run.folder, whole.folder)


@pytest.mark.parametrize("kind", BROKEN)
def test_j22_broken_lines_end_no_resumption(
    whole: Run, run: Run, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle as well, where they are told of."""
    metrics = run.folder / "metrics.jsonl"
    first, *others = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([first, BROKEN[kind].strip(b"\n") + b"\n", *others]))
    run.go_on_from("rl-000003")
    assert run.train() == 0
    told = f"{metrics}: 1 lines before step 3 were no records; dropped\n"
    assert capsys.readouterr().out.startswith(told)
    check_same(run.folder, whole.folder)


def test_j22_a_last_line_without_its_end_is_whole(whole: Run, run: Run) -> None:
    run.go_on_from("rl-000003")
    for name in LOGS:
        kept = [r for r in (run.folder / name).read_bytes().splitlines() if b'"step": 4' not in r]
        (run.folder / name).write_bytes(b"\n".join(kept))
    assert run.train() == 0
    check_same(run.folder, whole.folder)


def test_j22_a_log_that_is_gone_is_told_of(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.go_on_from("rl-000003")
    (run.folder / "metrics.jsonl").unlink()
    assert run.train() == 0
    assert "metrics.jsonl: is not there; records begin after step 3" in capsys.readouterr().out
    assert {record["step"] for record in lines(run.folder / "metrics.jsonl")} == {4}


def _interrupt_evaluation(patch: pytest.MonkeyPatch, number: int) -> None:
    """Sends SIGINT before an evaluation, counted from 0."""
    left = [number]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            signal.raise_signal(signal.SIGINT)
        return evaluate(*arguments)

    patch.setattr(runs, "evaluate", interrupted)


@pytest.mark.parametrize(("number", "name"), [(0, "supervised-000000"), (2, "rl-000002")])
def test_rl4_a_stop_before_a_phase_s_first_step_keeps_its_evaluation(
    whole: Run, tmp_path: Path, number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", "checkpoint.keep=9")
    with monkeypatch.context() as patch:
        _interrupt_evaluation(patch, number)
        assert run.train() == 130
    assert (run.folder / "checkpoints" / "latest").read_text(encoding="utf-8") == f"{name}\n"
    before = _content(run.folder / "checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_run_phase", _interrupted_phase)
        assert run.train() == 130
        assert _content(run.folder / "checkpoints") == before
    with monkeypatch.context() as patch:
        patch.setattr(Phase, "step", _interrupted_step)
        assert run.train() == 130
    assert run.train() == 0
    assert lines(run.folder / "metrics.jsonl") == lines(whole.folder / "metrics.jsonl")


def _interrupted_phase(trainer: Trainer, stop: StopRequest) -> Any:
    signal.raise_signal(signal.SIGINT)
    return RUN_PHASE(trainer, stop)


def _interrupted_step(phase: Phase) -> StepResult:
    signal.raise_signal(signal.SIGINT)
    return STEP(phase)


def test_rl4_tensorboard_has_no_event_twice(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it has those of a run that began again, went on within a phase, and after one."""
    run = Run(tmp_path / "events", "logging.tensorboard=true", "checkpoint.keep=9")
    assert run.train() == 0
    shutil.rmtree(run.folder / "checkpoints")
    assert run.train() == 0
    for name in ("rl-000003", "supervised-000002"):
        run.go_on_from(name)
        assert run.train() == 0
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    wanted: dict[str, list[tuple[int, Any]]] = {}
    for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        step, phase = record.pop("step"), record.pop("phase")
        for key, value in record.items():
            tag = key if key.startswith("heldout/") else f"{phase}/{key}"
            wanted.setdefault(tag, []).append((step, pytest.approx(value)))
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert found == wanted


FILES = """
dtype: float64
model: {type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
tokenizer: {type: character, characters: "0123456789"}
phases:
  - {type: rl, name: first, steps: 3, losses: {policy: {type: grpo}},
     rollouts: {type: files, paths: [one.jsonl], documents_per_step: 2}}
  - {type: rl, name: second, steps: 2, losses: {policy: {type: grpo}},
     rollouts: {type: files, paths: [one.jsonl, two.jsonl], documents_per_step: 2}}
logging: {tensorboard: false, report: false}
checkpoint: {every: 1, keep: 9}
"""


def _write_groups(file: Path, number: int, first: int = 1) -> None:
    write_rollouts(
        file,
        [
            Document(
                tokens=[first, 2 + group % 7, token],
                prompt_length=1,
                logprobs=[-1.0, -2.0],
                reward=float(token == 3),
                group_id=group,
            )
            for group in range(number)
            for token in (3, 4)
        ],
    )


@pytest.fixture
def on_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a finished run on rollout files of the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("files.yaml").write_text(FILES, encoding="utf-8")
    _write_groups(Path("one.jsonl"), 5)
    _write_groups(Path("two.jsonl"), 3, first=5)
    command = ["train", "files.yaml", "--run-dir", "run"]
    assert main(command) == 0
    return [*command, "--resume"]


def _go_on_from(name: str) -> None:
    Path("run/checkpoints/latest").write_text(f"{name}\n", encoding="utf-8")


@pytest.mark.parametrize("number", [5, 50, 1])
@pytest.mark.parametrize(
    ("name", "file"), [("first-000002", "one"), ("first-000002", "two"), ("second-000004", "two")]
)
def test_j24_changed_rollout_files_are_refused(
    on_files: list[str], number: int, name: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _go_on_from(name)
    _write_groups(Path(f"{file}.jsonl"), number, first=6)
    before = _content(Path("run"))
    capsys.readouterr()
    assert main(on_files) == 2
    assert capsys.readouterr().err.startswith(
        f"fastrl: error: {file}.jsonl: the rollout file must be as it was when the run began, but "
        "has other content, so run cannot go on with it; put the old back (SHA-256 "
    )
    assert _content(Path("run")) == before


def test_the_last_line_of_a_run_on_files_counts_the_steps_before(
    on_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree("run")
    ends = []
    for _ in range(2):
        assert main(on_files) == 0
        ends.append(capsys.readouterr().out.splitlines()[-1].partition(" (grpo")[0])
        _go_on_from("second-000004")
    assert ends[0] == ends[1]


def test_j24_files_that_nothing_reads_any_more_may_change(on_files: list[str]) -> None:
    before = final_weights(Path("run"))
    text = FILES.replace("[one.jsonl, two.jsonl]", "[two.jsonl]")
    Path("files.yaml").write_text(text, encoding="utf-8")
    shutil.rmtree("run")
    assert main(on_files) == 0
    whole = final_weights(Path("run"))
    assert any(not torch.equal(whole[name], before[name]) for name in whole)
    _go_on_from("first-000003")
    Path("one.jsonl").unlink()
    assert main(on_files) == 0
    torch.testing.assert_close(final_weights(Path("run")), whole, rtol=0, atol=0)


def test_j24_processes_must_read_the_same_files(tmp_path: Path) -> None:
    """A process whose disk has another file of that name would train on it."""

    class Other:
        def gather(self, value: dict[str, str]) -> list[dict[str, str]]:
            return [dict.fromkeys(value, "b" * 64), value]

    source: Any = SimpleNamespace(digests={"one.jsonl": "a" * 64})
    context: Any = SimpleNamespace(environment=None, processes=Other())
    with pytest.raises(UserError, match=r"^one\.jsonl: the rollout file must be the same on all"):
        with_inputs(TrainerState(), context, {0: source}, tmp_path)


def test_j24_another_tokenizer_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ids of later steps would mean something else."""
    file = tmp_path / "tokenizer.json"
    characters = "0123456789+-= "
    file.write_bytes(character_tokenizer_json(characters))
    tokenizer = f"tokenizer={{type: file, path: {file}, end_token: '{CHARACTERS_END}'}}"
    run = Run(tmp_path / "run", tokenizer)
    assert run.train() == 0
    run.go_on_from("rl-000003")
    capsys.readouterr()
    file.write_bytes(character_tokenizer_json(characters[::-1]))
    assert run.train() == 2
    assert "tokenizer.json: the tokenizer must be as it was when the run began" in (
        capsys.readouterr().err
    )


def test_old_checkpoints_that_cannot_be_removed_are_a_message(
    whole: Run, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def busy(path: Path, *arguments: Any, **named: Any) -> None:
        if Path(path).name.endswith(".removed.partial"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path, *arguments, **named)

    monkeypatch.setattr(shutil, "rmtree", busy)
    run.go_on_from("supervised-000002")
    assert run.train("checkpoint.keep=1") == 0
    out = capsys.readouterr().out
    folder = run.folder / "checkpoints"
    for name in (".rl-000003.removed.partial", ".supervised-000001.removed.partial"):
        message = f"{folder / name}: cannot be removed: Device or resource busy; remove it by hand"
        assert out.count(message) == 2  # when it is to go, and with the next checkpoint
    monkeypatch.undo()
    torch.testing.assert_close(
        final_weights(run.folder), final_weights(whole.folder), rtol=0, atol=0
    )


def test_j24_another_file_of_a_pattern_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("files.yaml").write_text(FILES.replace("[one.jsonl]", '["o*.jsonl"]'), encoding="utf-8")
    _write_groups(Path("one.jsonl"), 5)
    _write_groups(Path("two.jsonl"), 3, first=5)
    command = ["train", "files.yaml", "--run-dir", "run"]
    assert main(command) == 0
    _go_on_from("first-000002")
    _write_groups(Path("other.jsonl"), 1)
    assert main([*command, "--resume"]) == 2
    assert "o*.jsonl: the rollout file must be as it was when the run" in capsys.readouterr().err
    Path("other.jsonl").unlink()
    assert main([*command, "--resume"]) == 0
