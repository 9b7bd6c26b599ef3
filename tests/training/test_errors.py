"""Mistakes end `fastrl` with one message and exit code 2, and leave nothing behind."""

import errno
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.data.documents import Document
from fastrl.data.rollouts import write_rollouts
from fastrl.training.optimizer import apply_update
from tests.helpers.runs import write_tiny
from tests.long_run.process import num_children


def _error(
    folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str, name: str = "run"
) -> str:
    config = write_tiny(folder)
    before, children = sorted(folder.rglob("*")), num_children()
    assert main(["train", str(config), "--run-dir", str(folder / name), *overrides]) == 2
    assert sorted(folder.rglob("*")) == before
    gc.collect()  # workers end with their pool, which a traceback may hold in a cycle
    assert num_children() == children
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("fastrl: error: ")
    return error.removeprefix("fastrl: error: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.task=chain_summ", "did you mean `chain_sum`?"),
        ("environment.config.max_digit=3", "`environment.config` does not fit the task"),
        ("environment.config.seed=3", "`environment.config`: must not have ['seed'], which"),
        ("environment.question_pattern=(", "must be a regular expression: "),
        ("environment.question_pattern=x", "must have a group (in parentheses)"),
        ("environment.prompt=x", "must contain `{question}`"),
        ("environment=null", "`phases.0` needs an `environment`"),
        ("tokenizer.characters='0123'", "`tokenizer.characters` must hold every character of"),
        ("phases.0.max_tokens_per_micro_batch=5", "`phases.0.max_tokens_per_micro_batch` must be"),
        ("phases.1.max_tokens_per_micro_batch=5", "`phases.1.max_tokens_per_micro_batch` must be"),
        (
            "model={type: pretrained, path: none}; tokenizer={type: pretrained}",
            "none: must be the folder of a model, there is no such folder",
        ),
        ("model.vocab_size=7", "`model`: `vocab_size` must be at least the tokenizer's 15, got 7"),
        ("device=tpu9", "`device` must be `auto`, `cpu`, `cuda` or `cuda:N`, got 'tpu9'"),
        ("device=meta", "`device` must be `auto`, `cpu`, `cuda` or `cuda:N`, got 'meta'"),
        ("device=cuda:99", "`device` is 'cuda:99', but torch finds "),
        (
            "parallel.data=2",
            "`parallel` must have sizes that multiply to the number of processes, 1, got data 2 x",
        ),
        ("parallel.sequence_parallel=true", "`sequence_parallel` must be false with `tensor: 1`"),
        ("phases=[]", "`phases`"),
        ("phases.0.losses={}", "`phases.0` has no losses: set `phases.0.losses`"),
        ("phases.0.losses={a: {type: grpo}}", "`phases.0` is supervised and has no advantages"),
        ("phases.1.losses={a: {type: cross_entropy}}", "must have a policy-gradient loss such as"),
        ("phases.1.losses.policy.max_staleness=1", "`max_staleness` has no effect"),
        (
            "phases.1.losses.policy.on_policy=true",
            "`on_policy` must go with one update a step, got",
        ),
        (
            "phases.1.losses.policy.proximal={weight: 0.5}",
            "`proximal` must go with `rollouts` of type `files` or `server`: of what it",
        ),
        ("phases.1.losses.b={type: dpo}", "the trainer makes no batches for `type: dpo`"),
        ("phases.1.losses.b={type: distillation}", "makes no batches for `type: distillation`"),
        (
            "phases.0.losses={a: {type: cross_entropy, normalisation: groups}}",
            "`type: cross_entropy`, which needs `group_label_counts`, in a phase of type `sup",
        ),
        ("model.head.keep.top_k=5", "samples from the whole vocabulary, so `model.head.keep`"),
        ("phases.1.name=../rl", "`phases.1.name`: must begin with a letter, a digit or `_`"),
        ("phases.1.name=supervised", "`phases` must have different names"),
        ("phases.1.rollouts={type: files, paths: []}", "`phases.1.rollouts.paths`"),
        ("phases.1.rollouts.documents_per_step=3", "it belongs to type `files`"),
    ],
)
def test_a_config_that_does_not_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    error = _error(tmp_path, capsys, *override.split("; "))
    assert message in error
    assert error.count("\n") == 1


RL21 = [
    "num_threads=1" + "0" * 30,
    "device=cuda:99999999999999999999",
    f"evaluation.samples_per_prompt={2**64}",
    f"phases.1.rollouts.group_size={10**21}",
    f"environment.train_prompts={10**21}",
    "phases.1.losses.policy.epsilon_high=1e39",
    f"phases.1.losses.policy={{type: grpo, normalisation: constant, length: {10**30}}}",
    "evaluation.temperature=1e-300",
    "model.initializer_range=1e300",
    f"model.vocab_size={2**40}",
    f"model.num_hidden_layers={10**9}",
    f"environment.heldout_prompts={10**12}",
    f"phases.0.documents_per_step={10**21}",
    f"phases.1.mini_batches={10**18}",
    'model={type: pretrained, path: "a\\0b"}',
    "phases.1.losses.policy.weight=-1e39",
    "phases.1.losses.policy.entropy.bonus=1e300",
    "phases.0.losses.z={type: z_loss, weight: 1e300}",
    "model.head.softcap=1e300",
    "model.head.logit_scale=1e300",
    f"model.head.keep.top_k={2**70}",
    "model.rope.theta=1e300",
    "phases.0.optimizer.weight_decay=1e300",
]

RL22 = [
    "model.eos_token_id=-5",
    "model.rms_norm_eps=1e300",
    "model.initializer_range=0",
    "phases.0.optimizer.epsilon=1e300",
    "phases.0.optimizer.max_grad_norm=1e-300",
    f"phases.0.optimizer.warmup_updates={10**30}",
    "phases.1.rollouts.temperature=1e300",
    "phases.1.losses.policy.logits_scale=1e-300",
    "model.head.softcap=1e-300",
    "model.head.logit_scale=0",
    "model.head.logit_scale=1e-300",
]


def _refused_by_check(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str
) -> tuple[str, str]:
    """The message of `config check`, that of `train` being the same, and the path it names."""
    assert main(["config", "check", str(write_tiny(folder)), override]) == 2
    checked = capsys.readouterr().err.removeprefix("fastrl: error: ")
    assert _error(folder, capsys, override) == checked
    assert checked.count("\n") == 1
    origin, _, rest = checked.partition(": `")
    assert origin == f"override `{override}`"[: len(origin)]
    return checked, rest.split("`")[0]


@pytest.mark.parametrize("override", RL21, ids=lambda override: override[:50])
def test_rl21_values_that_no_run_can_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    message, path = _refused_by_check(tmp_path, capsys, override)
    assert path.startswith(override.split("=")[0])
    assert " must " in message


@pytest.mark.parametrize("command", ["train", "check", "eval", "sample"])
def test_rl21_a_path_with_a_nul_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    config, bad = str(write_tiny(tmp_path)), str(tmp_path / "a\0b")
    arguments = {
        "train": ["train", config, "--run-dir", bad],
        "check": ["config", "check", bad],
        "eval": ["eval", bad],
        "sample": ["sample", bad, "1 + 1 ="],
    }
    with pytest.raises(SystemExit) as ended:
        main(arguments[command])
    assert ended.value.code == 2
    assert "must not hold the character NUL, which no path can have" in capsys.readouterr().err


@pytest.mark.parametrize("override", RL22, ids=lambda override: override[:50])
def test_rl22_values_that_nothing_is_learned_with_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    message, path = _refused_by_check(tmp_path, capsys, override)
    assert path == override.split("=")[0]
    assert " must be " in message


@pytest.mark.parametrize("size", ["", "model.vocab_size=40"])
def test_rl22_an_end_token_outside_of_the_vocabulary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    error = _error(tmp_path, capsys, "model.eos_token_id=[0, 99]", *filter(None, [size]))
    wanted = 40 if size else 15
    assert error == (f"`model.eos_token_id` must be below the vocabulary size {wanted}, got 99\n")


def test_a_folder_that_is_in_use_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work", encoding="utf-8")
    assert "run: must be new or empty; choose another --run-dir" in _error(tmp_path, capsys)
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "must be a folder, is a file" in _error(tmp_path, capsys, name="file")


def test_without_a_supervised_phase_prompts_are_checked_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phase = "{type: rl, steps: 1, losses: {policy: {type: grpo}}}"
    error = _error(tmp_path, capsys, f"phases=[{phase}]", "tokenizer.characters='0123'")
    assert error.startswith("`tokenizer.characters` must hold every character of")


def test_a_prompt_without_tokens_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["environment.question_pattern=': (1?)'", "environment.heldout_prompts=1"]
    error = _error(tmp_path, capsys, *overrides)
    assert "every prompt must have at least one token, but the prompt of 'State the" in error


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    error = _error(tmp_path, capsys, name="file/run")
    assert error == f"{tmp_path / 'file' / 'run'}: Not a directory\n"


@pytest.mark.parametrize("writer", ["tensor_files._write_at", "checkpoint.write_manifest"])
def test_a_full_disk_is_one_message_and_leaves_no_part_of_a_checkpoint(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    writer: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"fastrl.training.{writer}", fail)
    run = tmp_path / "run"
    assert main(["train", str(write_tiny(tmp_path)), "--run-dir", str(run)]) == 2
    error = capsys.readouterr().err
    target = run / "checkpoints" / "supervised-000012"
    assert error.startswith(f"fastrl: error: {target}: the checkpoint cannot be written: ")
    assert "No space left on device" in error
    assert error.count("\n") == 1
    assert list((run / "checkpoints").iterdir()) == []


def test_a_malformed_rollout_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "prompt_length": "2"}\n', encoding="utf-8")
    override = f"phases.1.rollouts={{type: files, paths: [{path}]}}"
    error = _error(tmp_path, capsys, override)
    assert error.startswith(f"{path}, line 1: `prompt_length` ")


@pytest.mark.parametrize(
    "override",
    [
        "device=mps",
        "device=cuda:128",
        "device=cuda:99",
        "environment.task=chain_summ",
        "environment.config.x=1",
        "tokenizer.characters='0123'",
        "tokenizer={type: file, path: none.json, end_token: x}",
        "model.vocab_size=7",
        "model.eos_token_id=99",
        "model={type: pretrained, path: none}",
        "phases.0.max_tokens_per_micro_batch=5",
        "phases.1.max_tokens_per_micro_batch=5",
        "phases.1.rollouts={type: files, paths: [none.jsonl]}",
    ],
)
def test_the_check_refuses_what_a_run_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    config = write_tiny(tmp_path)
    assert main(["config", "check", str(config), override]) == 2
    out, checked = capsys.readouterr()
    assert out == ""
    assert checked == f"fastrl: error: {_error(tmp_path, capsys, override)}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tensor=4", "`parallel`: `num_key_value_heads` must be a multiple of the tensor"),
        (
            "parallel.tensor=8; model.num_attention_heads=8; model.head_dim=2; "
            "model.intermediate_size=64; model.vocab_size=17",
            "`parallel`: `vocab_size` must leave each of the 8 ranks of the tensor axis a row",
        ),
        ("logging.report=true", "`logging.report` needs the matplotlib package"),
    ],
)
def test_the_check_refuses_what_needs_other_processes_or_packages(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    message: str,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    config = str(write_tiny(tmp_path))
    assert main(["config", "check", config, *override.split("; ")]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"fastrl: error: {message}")
    assert error.count("\n") == 1


def test_the_check_makes_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """These are of some hundred GB."""
    config = str(write_tiny(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    assert main(["config", "check", config, "model.hidden_size=131072"]) == 0
    assert "hidden_size: 131072" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_k23_files_without_the_recorded_sets_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rollouts.jsonl"
    document = Document(tokens=[1, 2, 0], prompt_length=1, logprobs=[-0.5, -0.5], advantage=1.0)
    write_rollouts(path, [document, document])
    phase = f"{{type: rl, steps: 1, rollouts: {{type: files, paths: [{path}]}}}}"
    overrides = [f"phases=[{phase}]", "model.head.keep.recorded=true"]
    error = _error(tmp_path, capsys, *overrides, "phases.0.losses={policy: {type: grpo}}")
    assert error == (
        f"{path}, document 1: `kept_tokens` is required with `model.head.keep.recorded:"
        " true`, got none\n"
    )


@pytest.mark.parametrize("most_tokens", [3, 16])
def test_k21_documents_without_sets_are_trained_over_the_whole_vocabulary(
    tmp_path: Path, most_tokens: int
) -> None:
    """As those whose sets hold all of it, in a micro-batch of their own and beside others."""
    document = Document(tokens=[1, 2, 0], prompt_length=1, logprobs=[-0.5, -0.5], advantage=1.0)
    recorded = replace(document, kept_tokens=[[2, 3], [0]])
    losses = []
    for name, other in (
        ("without", document),
        ("whole", replace(document, kept_tokens=[list(range(64))] * 2)),
    ):
        path = tmp_path / f"{name}.jsonl"
        write_rollouts(path, [recorded, replace(other, tokens=[3, 1, 2])])
        phase = f"{{type: rl, steps: 1, rollouts: {{type: files, paths: [{path}]}}}}"
        overrides = [f"phases=[{phase}]", "model.head.keep.recorded=true"]
        overrides += ["phases.0.losses={policy: {type: grpo}}"]
        overrides += [f"phases.0.max_tokens_per_micro_batch={most_tokens}"]
        run = tmp_path / name
        assert main(["train", str(write_tiny(tmp_path)), "--run-dir", str(run), *overrides]) == 0
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append(next(row["loss"] for row in rows if "loss" in row))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_k23_a_supervised_phase_has_no_recorded_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = _error(tmp_path, capsys, "model.head.keep.recorded=true")
    assert "`phases.0` is supervised and has no `kept_tokens`, so `model.head.keep.rec" in error


def test_packages_that_lack_are_named_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    for option, package in (("tensorboard", "tensorboard"), ("report", "matplotlib")):
        error = _error(tmp_path, capsys, f"logging.{option}=true")
        assert error.startswith(f"`logging.{option}` needs the {package} package; install it with")


def test_processes_that_the_config_does_not_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    error = _error(tmp_path, capsys)
    assert "the number of processes, 4, got data 1 x sequence_data 1 x tensor 1 = 1" in error


def test_a_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(optimizer: Any, config: Any, update: int, num_updates: int) -> Any:
        norm = apply_update(optimizer, config, update, num_updates)
        return norm if update < 5 else norm * float("inf")

    monkeypatch.setattr("fastrl.training.phases.apply_update", explode)
    run = tmp_path / "run"
    bound = "phases.0.optimizer.max_skipped_updates=0"
    assert main(["train", str(write_tiny(tmp_path)), "--run-dir", str(run), bound]) == 2
    error = capsys.readouterr().err
    assert "step 6 (phase `supervised`): grad_norm must be finite, was not in 1 updates" in error
    assert len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 1 + 5


@pytest.mark.parametrize("command", [["eval"], ["sample"]])
def test_a_folder_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    prompt = ["1 + 1 ="] if command == ["sample"] else []
    assert main([*command, str(tmp_path), *prompt]) == 2
    assert "config.yaml: cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_bytes(write_tiny(tmp_path).read_bytes())
    assert main([*command, str(tmp_path), *prompt]) == 2
    assert "must be the folder of a run with a checkpoint, has no " in capsys.readouterr().err
