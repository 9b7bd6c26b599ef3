"""Losses by import path: in a run's file, in Python, and the mistakes one can make with them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from fastrl import LanguageModelHead, LanguageModelHeadConfig
from fastrl.cli import main
from fastrl.config import RunConfig, dump_config, load_config, parse_config
from fastrl.config.losses import AnyLossConfig, BuiltInLossConfig
from fastrl.config.yaml_text import parse_yaml
from fastrl.data.rollouts import write_rollouts
from fastrl.layers.losses import LanguageModelPolicyGradientLoss, build_loss
from fastrl.training.log_files import iter_metrics
from tests.helpers.batches import content_hidden, pack, ragged_documents
from tests.helpers.loss_documents import policy_documents
from tests.helpers.runs import tiny, write_tiny

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_loss.md"
DEMO = PAGE.read_text(encoding="utf-8").split("## In a package of your own")[1]
POLICY = {"type": "my_losses:HeldLoss", "epsilon_low": 0.05, "kl": {"coefficient": 0.1}}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the documentation, in the current folder and importable."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", DEMO, re.MULTILINE | re.DOTALL)
    assert source.count("\n") <= 30
    path = tmp_path / "my_losses.py"
    path.write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return path


def _check(folder: Path, capsys: pytest.CaptureFixture[str], losses: str) -> str:
    path = write_tiny(folder)
    assert main(["config", "check", str(path), f"phases.1.losses={losses}"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.removeprefix("fastrl: error: ")


def test_the_yaml_of_the_documentation_is_valid(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "path" / "to").mkdir(parents=True)
    example.replace(tmp_path / "path" / "to" / "my_losses.py")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", DEMO, re.MULTILINE | re.DOTALL)
    losses = parse_yaml(text)["losses"]
    del losses["policy"]  # its module is no longer on the path
    assert list(losses) == ["other"]
    path = write_tiny(tmp_path)
    override = "phases.1.losses={other: {type: path/to/my_losses.py:HeldLoss}}"
    assert main(["config", "check", str(path), override]) == 0
    assert "type: path/to/my_losses.py:HeldLoss" in capsys.readouterr().out
    head = LanguageModelHeadConfig(hidden_size=4, vocab_size=8, losses=losses)
    assert head.losses["other"].normalisation == "documents"


@pytest.mark.parametrize("kind", ["my_losses:HeldLoss", "my_losses.py:HeldLoss"])
def test_a_run_trains_with_a_loss_by_import_path(
    example: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = f"phases.1.losses={{policy: {{type: '{kind}', epsilon_low: 0.05}}}}"
    path, run = write_tiny(tmp_path), tmp_path / "run"
    assert main(["train", str(path), "--run-dir", str(run), losses]) == 0
    assert f"({kind}, " in capsys.readouterr().out.splitlines()[-1]
    records = [record for record in iter_metrics(run) if "policy/ratio" in record]
    assert len(records) == 4
    # What was resolved is read again: by `eval`, and to go on.
    assert load_config(RunConfig, run / "config.yaml") == tiny(losses)
    assert main(["eval", str(run)]) == 0
    assert main(["train", str(path), "--run-dir", str(run), "--resume", losses]) == 0


def test_it_is_the_built_in_loss_that_it_is_written_like(example: Path, tmp_path: Path) -> None:
    """Advantages below 0 alone: the lower clip of GRPO, and the same weights bit by bit."""
    metrics = []
    kinds = ("my_losses:HeldLoss", "grpo")
    documents = [
        document
        for document in policy_documents()
        if isinstance(document.advantage, float) and document.advantage < 0
    ]
    write_rollouts(tmp_path / "r.jsonl", documents)
    for name, kind in enumerate(kinds):
        overrides = [
            "model.vocab_size=29",
            f"phases.1.losses={{policy: {{type: '{kind}', kl: {{coefficient: 0.1}}}}}}",
            "phases.1.rollouts={type: files, paths: [r.jsonl], documents_per_step: 2}",
        ]
        run = tmp_path / str(name)
        assert main(["train", str(write_tiny(tmp_path)), "--run-dir", str(run), *overrides]) == 0
        metrics.append([record.get("policy/loss") for record in iter_metrics(run)])
    assert metrics[0] == metrics[1]
    assert any(metrics[0])


def test_a_file_lacks_a_column_that_the_loss_needs(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rollouts(tmp_path / "r.jsonl", ragged_documents())
    path = write_tiny(tmp_path, {"phases": [_file_phase(POLICY)]})
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(path), "--run-dir", str(tmp_path / "run")]) == 2
    assert "r.jsonl, line 1: `ref_logprobs` is required" in capsys.readouterr().err
    assert {item for item in tmp_path.rglob("*") if "__pycache__" not in str(item)} == set(before)


def _file_phase(loss: dict[str, Any]) -> dict[str, Any]:
    rollouts = {"type": "files", "paths": ["r.jsonl"]}
    return {"type": "rl", "steps": 1, "losses": {"policy": loss}, "rollouts": rollouts}


def test_the_head_takes_it_from_python(example: Path) -> None:
    batch = pack(ragged_documents())
    losses: dict[str, Any] = {"policy": {"type": "my_losses:HeldLoss", "epsilon_low": 0.05}}
    config = LanguageModelHeadConfig(hidden_size=5, vocab_size=33, losses=losses)
    head = LanguageModelHead(config, dtype=torch.float64)
    loss = head.losses["policy"]
    assert isinstance(loss, LanguageModelPolicyGradientLoss)
    assert (type(loss).__name__, loss.config.epsilon_low) == ("HeldLoss", 0.05)
    assert type(loss.config) is type(loss).config_class
    value = head(content_hidden(batch), batch).loss
    assert value is not None
    # The same as an object: of the config, and of the loss itself.
    again = LanguageModelHeadConfig(hidden_size=5, vocab_size=33, losses={"policy": loss.config})
    assert again == config
    other = LanguageModelHead(again, dtype=torch.float64)
    other.load_state_dict(head.state_dict())
    other.losses["policy"] = type(loss)(loss.config)
    assert torch.equal(other(content_hidden(batch), batch).loss, value)
    assert parse_config(LanguageModelHeadConfig, parse_yaml(dump_config(config))) == config


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("epsilon_hgih: 1", "unknown key `epsilon_hgih` in `phases.1.losses.policy` (type `my_"),
        ("epsilon_lwo: 1", "(type `my_losses:HeldLoss`); did you mean `epsilon_low`?"),
        ("delta: 2", "(type `my_losses:HeldLoss`): it belongs to type `grpo`, `gspo`"),
        ("epsilon_low: 2", "`phases.1.losses.policy.epsilon_low` must be less than or equal to 1,"),
        ("epsilon_low: x", "`phases.1.losses.policy.epsilon_low` must be a valid number, got 'x'"),
        ("epsilon_low: true", "`phases.1.losses.policy.epsilon_low` must not be a boolean, got"),
        ("kl: {}", "`phases.1.losses.policy.kl.coefficient` is required"),
        ("kl: {coeficient: 1}", "unknown key `coeficient` in `phases.1.losses.policy.kl`; did you"),
        ("length: 3", "`phases.1.losses.policy`: `length` must be given with"),
        ("max_staleness: 2", "`phases.1` loss `policy`: `max_staleness` has no effect"),
    ],
)
def test_mistakes_in_its_keys_are_told_as_for_any_loss(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str, message: str
) -> None:
    error = _check(tmp_path, capsys, f"{{policy: {{type: 'my_losses:HeldLoss', {loss}}}}}")
    assert message in error
    assert error.startswith("override `phases.1.losses=") or "max_staleness" in loss
    assert "imported" not in error


OTHERS = """
import torch
from fastrl.config import Config, GRPOLossConfig, LossConfig, PolicyGradientLossConfig
from fastrl.layers.losses import LanguageModelLoss, LanguageModelPolicyGradientLoss

class NoLoss:
    pass

class WithoutConfig(LanguageModelPolicyGradientLoss):
    def surrogate(self, terms):
        return -terms.advantages * terms.ratio

class OfAnother(LanguageModelPolicyGradientLoss[GRPOLossConfig]):
    def surrogate(self, terms):
        return -terms.advantages * terms.ratio

class Named(PolicyGradientLossConfig):
    type: str = "others:ByAttribute"

class ByAttribute(WithoutConfig):
    config_class = Named

class Abstract(LanguageModelPolicyGradientLoss[Named]):
    pass
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "nowhere.losses:My",
            "must name a class, but there is no module `nowhere.losses`; inst",
        ),
        ("nowhere.py:My", "must name a class, but there is no file `nowhere.py`; paths are relati"),
        ("others:NoLos", "but `others` has no class `NoLos`; did you mean `NoLoss`?"),
        ("others:torch", "but `others` has no class `torch`"),
        (
            "others:",
            "must name a class as `my_package.module:Class` or `path/to/file.py:Cl",
        ),
        ("others:NoLoss", "must name a subclass of `fastrl.layers.losses.LanguageModelLoss`, got"),
        ("others:WithoutConfig", "a config of its own, but `others:WithoutConfig` has none; set"),
        ("others:OfAnother", "`others:OfAnother` has GRPOLossConfig without `type: str`; set"),
        ("others:Abstract", "but `others:Abstract` does not define `surrogate`"),
        ("broken.py:Loss", "ZeroDivisionError: division by zero"),
        ("needy:Loss", "ModuleNotFoundError: No module named 'not_installed'"),
        ("unwritten.py:Loss", "SyntaxError: "),
        ("ppo", "must have a `type`, one of `cross_entropy`, `z_loss`, "),
    ],
)
def test_what_is_no_loss_is_one_message(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "others", raising=False)
    (tmp_path / "others.py").write_text(OTHERS, encoding="utf-8")
    (tmp_path / "broken.py").write_text("a = 1\nb = a / 0\n", encoding="utf-8")
    (tmp_path / "needy.py").write_text("import not_installed\n", encoding="utf-8")
    (tmp_path / "unwritten.py").write_text("class Loss(\n", encoding="utf-8")
    error = _check(tmp_path, capsys, f"{{policy: {{type: '{kind}'}}}}")
    assert message in error
    assert error.count("\n") == 1
    assert "`phases.1.losses.policy" in error
    if kind.startswith("broken"):
        assert f"({tmp_path / 'broken.py'}, line 2)" in error or "(broken.py, line 2)" in error
    assert (
        main(["config", "check", "tiny.yaml", "phases.1.losses={p: {type: others:ByAttribute}}"])
        == 0
    )


def test_a_type_that_names_no_loss_is_refused_in_python() -> None:
    class Nameless(Exception):
        type = "mine"

    with pytest.raises(ValueError, match=r"must name a class as `my_package\.module:Class`"):
        build_loss(Nameless())  # type: ignore[arg-type]


def test_the_schema_is_that_of_the_built_in_losses_and_one_branch() -> None:
    schema = TypeAdapter(AnyLossConfig).json_schema()
    built_in = TypeAdapter(BuiltInLossConfig).json_schema()
    assert schema["$defs"] == built_in["$defs"]
    first, other = schema["oneOf"]
    assert first == {name: value for name, value in built_in.items() if name != "$defs"}
    assert other["properties"]["type"]["pattern"] == ":"


@pytest.mark.parametrize(("kind", "loads"), [("grpo", False), ("my_losses:HeldLoss", True)])
def test_torch_is_imported_only_for_a_class_that_needs_it(
    example: Path, kind: str, loads: bool
) -> None:
    program = (
        "import sys; from fastrl.config import HeadOptions, dump_config;"
        f"print(dump_config(HeadOptions(losses={{'a': {{'type': '{kind}'}}}})));"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"type: {kind}" in done.stdout
    assert done.stdout.splitlines()[-1] == str(loads)
