"""`fastrl init` and `fastrl doctor`."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

from fastrl.cli import main
from fastrl.config import RunConfig, load_config
from fastrl.config.transformers_model import LoraConfig, TransformersModelConfig
from tests.helpers.hf_models import tiny_model
from tests.helpers.pretrained import write_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")


SHORT = [
    *("phases.0.steps=1", "environment.heldout_prompts=2", "environment.train_prompts=8"),
    *("sampler.max_new_tokens=4", "logging.report=false", "logging.tensorboard=false"),
    "phases.0.rollouts={type: sampler, prompts_per_step: 2, group_size: 2}",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_pretrained(tmp_path / "model")


def test_the_config_trains_as_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "sums.yaml"
    assert main(["init", str(model), str(file), "--task", "chain_sum"]) == 0
    run = f"runs/{file.stem}"
    assert capsys.readouterr().out == f"{file}: go on with: fastrl train {file} --run-dir {run}\n"
    text = file.read_text(encoding="utf-8")
    assert "14,384 parameters, with a context of 2,048 tokens" in text
    assert "ends at token 1 or 2," in text
    assert "has a chat template, which is not applied" in text
    assert '#     "State the final answer to the following arithmetic problem: ' in text
    config = load_config(RunConfig, file)
    assert (config.sampler.max_new_tokens, config.phases[0].max_tokens_per_micro_batch) == (
        256,
        8192,
    )
    assert main(["train", str(file), "--run-dir", str(tmp_path / "run"), *SHORT]) == 0


@pytest.mark.parametrize(("family", "options"), [("gemma", []), ("llama", ["--lora"])])
def test_other_models_and_adapters_are_those_of_transformers(
    model: Path,
    tmp_path: Path,
    family: str,
    options: list[str],
) -> None:
    sizes = {"vocab_size": 320, "max_position_embeddings": 1024}
    tiny_model(family, dtype=torch.float32, **sizes).save_pretrained(model)
    file = tmp_path / "run.yaml"
    assert main(["init", str(model), str(file), "--task", "chain_sum", *options]) == 0
    text = file.read_text(encoding="utf-8")
    assert f"# Of architecture {family}, " in text
    assert "parameters, with a context of 1,024 tokens." in text
    assert "fastrl estimate" not in text  # which refuses it
    config = load_config(RunConfig, file)
    assert isinstance(config.model, TransformersModelConfig)
    assert config.model.lora == (LoraConfig() if options else None)
    assert config.phases[0].optimizer.learning_rate == (1e-3 if options else 1e-4)
    train = ["train", str(file), "--run-dir", str(tmp_path / "run"), *SHORT]
    assert main(train if options else ["config", "check", str(file)]) == 0


def test_a_task_of_ones_own(model: Path, tmp_path: Path) -> None:
    task = "examples/my_task.py:Reversal"
    (model / "chat_template.jinja").unlink()
    assert main(["init", str(model), str(tmp_path / "run.yaml"), "--task", task]) == 0
    text = (tmp_path / "run.yaml").read_text(encoding="utf-8")
    assert f'environment:\n  type: python\n  path: "{task}"\n  train_prompts: ' in text
    assert "chat template" not in text


def test_what_no_config_fits_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(*arguments: str) -> str:
        assert main(["init", *arguments]) == 2
        return capsys.readouterr().err

    file = tmp_path / "run.yaml"
    assert "`environment.task`: reasoning-gym has no task `chain_sun`; did you mean" in message(
        str(model), str(file), "--task", "chain_sun"
    )
    assert "cannot be read: No such file" in message(str(tmp_path / "none"), str(file))
    assert not file.exists()
    file.touch()
    assert "exists already" in message(str(model), str(file))


def test_the_doctor_names_what_is_there_and_what_a_missing_piece_costs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == "pyarrow":
            raise metadata.PackageNotFoundError(package)
        return metadata.version(package)

    monkeypatch.setattr("fastrl.training.doctor.version", version)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fastrl ")
    assert f"  yes tokenizers {metadata.version('tokenizers')}" in lines
    missing = lines.index("  no  pyarrow missing")
    assert lines[missing + 1] == "      no Parquet files; .jsonl and .jsonl.gz serve"
    for number, line in enumerate(lines):
        if line.startswith("  no "):
            assert lines[number + 1].startswith("      ")
