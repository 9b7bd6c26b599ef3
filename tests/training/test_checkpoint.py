"""Checkpoints: what is damaged, foreign or not finite is refused by name, and nothing is lost."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastrl.cli import main
from fastrl.config import UserError
from fastrl.models.checkpoint import read_llama_config
from fastrl.models.llama import Llama
from fastrl.training import checkpoint as checkpoints
from fastrl.training.checkpoint import latest_checkpoint
from fastrl.training.manifest import config_digest, write_manifest
from fastrl.training.optimizer import build_optimizer
from fastrl.training.trainer_state import TrainerState, read_trainer_state, trained_names
from tests.helpers.runs import final_weights, tiny, write_tiny

OVERRIDES = [
    *("phases.0.steps=3", "phases.1.steps=2", "phases.1.mini_batches=1"),
    *("environment.heldout_prompts=4", "checkpoint.every=1", "checkpoint.keep=9"),
    "phases.1.losses.policy={type: grpo, kl: {coefficient: 0.1}}",
]


@dataclass
class Run:
    """A finished run, or a copy of one."""

    folder: Path
    command: list[str]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def last(self) -> Path:
        return self.checkpoints / "rl-000005"

    def go_on_from(self, name: str) -> None:
        """Makes the run one that was stopped at a checkpoint."""
        (self.checkpoints / "latest").write_text(f"{name}\n", encoding="utf-8")

    def resume(self) -> int:
        return main([*self.command, "--run-dir", str(self.folder), "--resume"])

    def state(self) -> TrainerState:
        """The state of the last checkpoint, checked."""
        config = tiny(*OVERRIDES)
        return read_trainer_state(self.last, config, _llama(self.last))


def _llama(folder: Path) -> Llama:
    return Llama(read_llama_config(folder), dtype=torch.float64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("made")
    run = Run(folder / "run", ["train", str(write_tiny(folder)), *OVERRIDES])
    assert main([*run.command, "--run-dir", str(run.folder)]) == 0
    return run


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    shutil.copytree(made.folder, tmp_path / "run")
    return Run(tmp_path / "run", made.command)


def test_a_checkpoint_is_json_and_safetensors_on_the_disk(
    made: Run, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.suffix for path in made.checkpoints.rglob("*") if path.is_file()}
    assert files == {".json", ".safetensors", ""}  # without a suffix: `latest`
    before: list[str] = []
    sync, rename = checkpoints.sync_one, Path.rename

    def synced(path: Path) -> None:
        before.append(path.name)
        sync(path)

    def renamed(path: Path, target: Path) -> Path:
        if target.name == "rl-000005":
            names = {file.name for file in made.last.rglob("*")} | {".rl-000005.partial"}
            assert names <= set(before)
        return rename(path, target)

    monkeypatch.setattr(checkpoints, "sync_one", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    run.go_on_from("rl-000004")
    assert run.resume() == 0
    assert before[-4:] == [".latest.partial", "checkpoints", "checkpoints", "run"]
    torch.testing.assert_close(
        final_weights(run.folder), final_weights(made.folder), rtol=0, atol=0
    )


def test_the_state_comes_back_as_it_was_saved(made: Run) -> None:
    state = made.state()
    assert (state.phase, state.phase_step, state.step, state.position) == (1, 2, 5, 12)
    llama = _llama(made.last)
    assert state.optimizer is not None
    assert state.reference is not None
    assert set(state.optimizer) == set(trained_names(llama))
    assert set(state.reference) == {name for name, _ in llama.named_parameters()}


def test_a_checkpoint_loads_in_transformers(made: Run) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(made.last, dtype=torch.float64)
    weights = dict(theirs.named_parameters())
    assert len(weights) == 12
    for name, weight in final_weights(made.folder).items():
        assert torch.equal(weights[name], weight)


def test_names_are_in_the_order_of_the_optimizer(made: Run) -> None:
    llama = Llama(read_llama_config(made.last))
    optimizer = build_optimizer(llama, tiny().phases[0].optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = dict(llama.named_parameters())
    assert [id(named[name]) for name in trained_names(llama)] == [id(p) for p in parameters]


def test_format_1_is_still_read(made: Run, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.checkpoints / "rl-000004"
    _to_format_1(folder, lambda values: None)
    run.go_on_from("rl-000004")
    shutil.rmtree(run.last)
    assert run.resume() == 0
    out = capsys.readouterr().out
    assert out.startswith("rl-000004 is of format 1, without checksums; the next is of 2\n")
    names = ("model.safetensors", "trainer/optimizer.safetensors", "trainer/reference.safetensors")
    for name in names:
        expected = load_file(made.last / name)
        torch.testing.assert_close(load_file(run.last / name), expected, rtol=0, atol=0)
    assert latest_checkpoint(run.folder) == run.last


def _to_format_1(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites a checkpoint as the first format had it, by-number states and all."""
    config = tiny(*OVERRIDES)
    state = read_trainer_state(folder, config, _llama(folder))
    assert state.optimizer is not None
    values = dict(vars(state))
    names = trained_names(_llama(folder))
    states = {index: state.optimizer[name] for index, name in enumerate(names)}
    values["optimizer"] = {"state": states, "param_groups": [{"lr": 9.0, "maximize": True}]}
    change(values)
    shutil.rmtree(folder / "trainer")
    (folder / "manifest.json").unlink()
    torch.save(values, folder / "trainer.pt")


def _first(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = values["optimizer"]["state"][0]
    return result


@pytest.mark.parametrize("shape", [(3, 3), (1,), ()])
@pytest.mark.parametrize("old", [False, True])
def test_rl1_moments_of_another_shape_are_refused(
    run: Run, shape: tuple[int, ...], old: bool
) -> None:
    if old:
        _to_format_1(run.last, lambda values: _first(values).update(exp_avg=torch.zeros(shape)))
    else:
        _rewrite_optimizer(run, {"model.embed_tokens.weight.exp_avg": torch.zeros(shape)})
    with pytest.raises(UserError, match="do not fit the model") as caught:
        run.state()
    assert "`model.embed_tokens.weight.exp_avg` must have shape [15, 16] and torch.float64" in str(
        caught.value
    )
    assert f"got {list(shape)} and torch.float32" in str(caught.value)


def test_rl1_exchanged_moments_are_refused(run: Run) -> None:
    tensors = load_file(run.last / "trainer" / "optimizer.safetensors")
    one, other = "model.norm.weight.exp_avg", "model.embed_tokens.weight.exp_avg"
    _rewrite_optimizer(run, {one: tensors[other], other: tensors[one]})
    with pytest.raises(UserError, match=r"`model\.norm\.weight\.exp_avg` must have shape \[16\]"):
        run.state()


def _rewrite_optimizer(run: Run, changes: Mapping[str, torch.Tensor | None]) -> None:
    file = run.last / "trainer" / "optimizer.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(file), **changes}
    save_file({name: value.clone() for name, value in tensors.items() if value is not None}, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": -1}, "`phase`"),
        ({"phase": 2}, "`phase` must be from 0 to 1 with the run's config, got 2"),
        ({"phase_step": 999}, "`phase_step` must be from 0 to 2 with"),
        ({"step": 4}, "`step` must be 5 with the run's config, got 4"),
        ({"position": 10**18}, "`position`"),
        ({"position": 13}, "`position` must be 12 with the run's config, got 13"),
        ({"rewards": []}, "`number of rewards` must be from 1 to 2 with"),
        ({"format": 3}, "`format`"),
        ({"seconds": "long"}, "`seconds`"),
        ({"maximize": True}, "maximize"),
    ],
)
def test_rl8_numbers_that_the_run_does_not_have_are_refused(
    run: Run, change: dict[str, Any], message: str
) -> None:
    file = run.last / "trainer" / "progress.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | change), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        run.state()
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["{}", "[]", '{"a": NaN', "[" * 100_000, "\xff"])
def test_rl8_a_file_that_is_no_progress_is_refused(run: Run, text: str) -> None:
    file = run.last / "trainer" / "progress.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"progress\.json: "):
        run.state()


def test_rl8_half_an_optimizer_state_is_refused(run: Run) -> None:
    _rewrite_optimizer(run, {"model.norm.weight.step": None, "more.exp_avg": torch.ones(1)})
    with pytest.raises(UserError) as caught:
        run.state()
    assert "missing `model.norm.weight.step`\n  unexpected `more.exp_avg`" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.clear(),
        lambda values: values.pop("optimizer"),
        lambda values: values["optimizer"]["state"].pop(0),
        lambda values: values["optimizer"]["state"].update({99: {}}),
        lambda values: values.update(phase=-1),
        lambda values: values.update(reference={"model.norm.weight": torch.ones(())}),
    ],
)
def test_rl8_states_of_format_1_are_checked_too(
    run: Run, change: Callable[[dict[str, Any]], object]
) -> None:
    _to_format_1(run.last, change)
    with pytest.raises(UserError, match=r"trainer\.pt: "):
        run.state()


@pytest.mark.parametrize(
    ("bonus", "message"),
    [
        ({"policy": {"factor": 1e9, "is_acting": 1.0}}, "`entropy_bonus.policy.factor` must be"),
        ({}, "`entropy_bonus` must be of the losses ['policy']"),
    ],
)
def test_rl8_a_bonus_that_the_config_excludes_is_refused(
    run: Run, bonus: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run.checkpoints / "rl-000004"
    file = checkpoint / "trainer" / "progress.json"
    values = json.loads(file.read_text("utf-8")) | {"entropy_bonus": bonus}
    file.write_text(json.dumps(values), encoding="utf-8")
    write_manifest(checkpoint, config_digest(tiny(*OVERRIDES)))  # as somebody else might
    run.go_on_from("rl-000004")
    assert run.resume() == 2
    assert message in capsys.readouterr().err


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_rl7_every_damaged_file_is_named_and_the_checkpoint_before_offered(run: Run) -> None:
    files = [file for file in run.last.rglob("*") if file.is_file()]
    assert len(files) == 9
    for file in files:
        whole = file.read_bytes()
        place = len(whole) // 2
        for content in (
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
            whole[:place] + bytes(len(whole) - place),
            whole[:place],
            whole + b" ",
        ):
            file.write_bytes(content)
            if file.name == "manifest.json" and content == whole + b" ":
                assert latest_checkpoint(run.folder) == run.last  # the same JSON
                continue
            with pytest.raises(UserError) as caught:
                latest_checkpoint(run.folder)
            error = str(caught.value)
            # A damaged manifest may tell of another file.
            assert error.startswith(f"{run.last}/" if "manifest" in file.name else f"{file}: must ")
            offer = f"rl-000004 before it is whole: to go on from that, move {run.last.name} away"
            assert offer in error
        file.unlink()
        with pytest.raises(UserError, match="rl-000004 before it is whole"):
            latest_checkpoint(run.folder)
        file.write_bytes(whole)
    assert latest_checkpoint(run.folder) == run.last


def test_rl7_damage_ends_a_resumption_and_the_offer_holds(
    made: Run, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run.last / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (run.checkpoints / "rl-000004" / "config.json").unlink()
    before = _names(run.folder)
    assert run.resume() == 2
    error = capsys.readouterr().err
    assert "model.safetensors: must have SHA-256 " in error
    assert "supervised-000003 before it is whole" in error
    assert _names(run.folder) == before
    run.go_on_from("supervised-000003")
    assert run.resume() == 0
    torch.testing.assert_close(
        final_weights(run.folder), final_weights(made.folder), rtol=0, atol=0
    )


def test_rl7_unlisted_files_and_other_configs_are_refused(run: Run) -> None:
    (run.last / "more.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"more\.safetensors: must be in manifest\.json, is not"):
        latest_checkpoint(run.folder)
    (run.last / "more.safetensors").unlink()
    write_manifest(run.last, config_digest(tiny("seed=4")))
    with pytest.raises(UserError, match="must be of the run's config, whose digest is "):
        latest_checkpoint(run.folder)


def test_the_digest_is_of_what_determines_the_result() -> None:
    digest = config_digest(tiny())
    same = ["checkpoint.keep=9", "logging.samples_every=7", "device=cpu", "seed=3"]
    assert {config_digest(tiny(change)) for change in same} == {digest}
    others = ["seed=4", "phases.1.losses.policy.type=gspo", "phases.0.steps=13", "dtype=float32"]
    assert len({config_digest(tiny(change)) for change in others} | {digest}) == 5


@pytest.mark.parametrize(
    "content",
    [b"../../other/checkpoints/rl-000005", b"/tmp/rl-000005", b"..", b"", b"\xff\xfe", b"best"],
)
def test_rl10_latest_is_a_plain_name(
    run: Run, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.folder, run.folder.parent / "other")
    (run.checkpoints / "latest").write_bytes(content)
    assert run.resume() == 2
    error = capsys.readouterr().err
    assert "latest: must be the name of a checkpoint beside it, such as supervised-000010" in error


def test_rl10_a_checkpoint_is_no_link(run: Run) -> None:
    run.last.rename(run.folder.parent / "elsewhere")
    run.last.symlink_to(run.folder.parent / "elsewhere")
    with pytest.raises(UserError, match="rl-000005: must be the folder of a checkpoint, is none"):
        latest_checkpoint(run.folder)


FOREIGN = (
    *("best", ".ipynb_checkpoints", "rl-000002-backup", "mine-000003", "rl-000002"),
    *(".mine-000003.partial", "rl-4"),
)
LEFT = (".rl-000007.partial", ".rl-000009.partial.tmp", ".supervised-000002.partial")


def _stays(run: Run) -> None:
    for name in (*FOREIGN, *LEFT):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "file").write_text("mine", encoding="utf-8")
    write_manifest(run.checkpoints / "rl-000002", config_digest(tiny("seed=9")))  # another run's
    run.go_on_from("rl-000004")
    assert run.resume() == 0
    for name in FOREIGN:
        assert (run.checkpoints / name / "file").read_text(encoding="utf-8") == "mine"
    assert not any((run.checkpoints / name).exists() for name in LEFT)


def test_j21_foreign_folders_stay_and_half_written_ones_go(run: Run) -> None:
    _stays(run)


def test_rl5_only_this_run_s_checkpoints_are_removed(run: Run, made: Run) -> None:
    run.command = [*made.command, "checkpoint.keep=2"]
    _stays(run)
    assert {path.name for path in run.checkpoints.iterdir()} == {
        *("latest", "rl-000004", "rl-000005"),
        *FOREIGN,
    }


def test_rl5_a_foreign_folder_of_the_checkpoint_s_name_is_not_overwritten(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run.last)
    run.last.mkdir()
    run.go_on_from("rl-000004")
    assert run.resume() == 2
    assert "rl-000005: the checkpoint cannot be written: the folder is there and not of this" in (
        capsys.readouterr().err
    )
    assert latest_checkpoint(run.folder).name == "rl-000004"
    assert list(run.last.iterdir()) == []
    assert not (run.checkpoints / ".rl-000005.partial").exists()


def test_checkpoints_of_later_steps_are_not_kept_before_earlier_ones(run: Run) -> None:
    run.command = [*run.command, "checkpoint.keep=2", "phases.1.steps=2"]
    run.last.rename(run.checkpoints / "rl-000009")
    run.go_on_from("rl-000004")
    assert run.resume() == 0
    assert {path.name for path in run.checkpoints.iterdir()} == {"latest", "rl-000004", "rl-000005"}


def test_rl6_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    overrides = [
        *("phases.0.steps=3", "phases.1.mini_batches=1", "phases.1.steps=2", "dtype=float32"),
        *("phases.1.optimizer.learning_rate=1e38", "checkpoint.every=1", "checkpoint.keep=1"),
    ]
    command = ["train", str(write_tiny(tmp_path)), "--run-dir", str(run), *overrides]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastrl: error: step 4 (phase `rl`): the weights must be finite, are ")
    assert error.count("\n") == 1
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "latest",
        "supervised-000003",
    }
    assert latest_checkpoint(run).name == "supervised-000003"


def test_no_reward_is_written_as_json_has_it(made: Run, run: Run) -> None:
    file = run.last / "trainer" / "progress.json"
    values = json.loads(file.read_text("utf-8")) | {"rewards": [0.5, None]}
    file.write_text(json.dumps(values), encoding="utf-8")
    rewards = run.state().rewards
    assert rewards[0] == 0.5
    assert math.isnan(rewards[1])
