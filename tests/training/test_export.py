"""`fastrl export`: a plain Hugging Face folder, which answers as the run does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl.cli import main
from fastrl.models.checkpoint import load_llama, save_llama
from fastrl.training.manifest import check_manifest, write_manifest
from tests.helpers.pretrained import TOKENIZER_CONFIG, write_json, write_pretrained
from tests.helpers.runs import FinishedRun, write_tiny

LAST = "rl-000016"
PROMPTS = ("1 + 2 =", "3", "9 - 9")


def _continued(folder: Path, prompt: str, max_tokens: int) -> str:
    """The prompt with its greedy completion, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
    completion = output[0, inputs["input_ids"].shape[1] :]
    return prompt + str(tokenizer.decode(completion, skip_special_tokens=True))


def _sampled(run: Path, prompt: str, capsys: pytest.CaptureFixture[str], max_tokens: int) -> str:
    options = ["--temperature", "0", "--max-tokens", str(max_tokens)]
    assert main(["sample", str(run), prompt, *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_transformers_continues_as_the_run_does(
    finished: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "model"
    assert main(["export", str(finished.folder), str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{LAST} -> {folder}: ")
    assert out.endswith(" weights in float64 (as in the checkpoint)\n")
    checkpoint = finished.folder / "checkpoints" / LAST
    names = {path.name for path in checkpoint.iterdir()}
    assert {path.name for path in folder.iterdir()} == names - {"trainer", "manifest.json"}
    assert list(folder.parent.iterdir()) == [folder]
    for prompt in PROMPTS:
        assert _continued(folder, prompt, 8) == _sampled(finished.folder, prompt, capsys, 8)


def test_an_earlier_checkpoint_in_another_dtype(
    finished: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "supervised-000012"
    options = ["--checkpoint", name, "--dtype", "bfloat16"]
    assert main(["export", str(finished.folder), str(tmp_path / "model"), *options]) == 0
    assert capsys.readouterr().out.endswith(" weights in bfloat16 (as asked)\n")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    expected = load_file(finished.folder / "checkpoints" / name / "model.safetensors")
    assert weights.keys() == expected.keys()
    for key, tensor in weights.items():
        assert torch.equal(tensor, expected[key].to(torch.bfloat16))
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.dtype == torch.bfloat16


def test_a_folders_own_tokenizer_and_template_go_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_pretrained(tmp_path / "model")
    write_json(source / "tokenizer_config.json", TOKENIZER_CONFIG | {"eos_token": "</s>"})
    values = {
        "model": {"type": "pretrained", "path": str(source)},
        "tokenizer": {"type": "pretrained"},
        "phases": [
            {"type": "supervised", "steps": 1, "losses": {"answers": {"type": "cross_entropy"}}}
        ],
    }
    run = tmp_path / "run"
    assert main(["train", str(write_tiny(tmp_path, values)), "--run-dir", str(run)]) == 0
    # In several files, as large models are.
    checkpoint = run / "checkpoints" / "supervised-000001"
    save_llama(
        load_llama(checkpoint, dtype=torch.float64), tmp_path / "split", max_shard_bytes=40_000
    )
    (checkpoint / "model.safetensors").unlink()
    for file in (tmp_path / "split").glob("model*"):
        shutil.copy(file, checkpoint)
    write_manifest(checkpoint, json.loads((checkpoint / "manifest.json").read_text())["config"])
    target = tmp_path / "exported"
    assert main(["export", str(run), str(target), "--dtype", "float32"]) == 0
    assert len(list(target.glob("model-*.safetensors"))) > 1
    index = json.loads((target / "model.safetensors.index.json").read_text(encoding="utf-8"))
    tensors = [load_file(file) for file in target.glob("*.safetensors")]
    total = sum(tensor.nbytes for held in tensors for tensor in held.values())
    assert index["metadata"]["total_size"] == total
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert (target / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    capsys.readouterr()
    prompt = "what is 12 + 7 ?"
    assert _continued(target, prompt, 6) == _sampled(run, prompt, capsys, 6)


def test_what_cannot_be_exported_is_refused_by_name(
    finished: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(*arguments: str) -> str:
        assert main(["export", *arguments]) == 2
        assert list(tmp_path.glob(".*")) == []
        return capsys.readouterr().err

    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    target = str(tmp_path / "model")
    there = tmp_path / "there"
    there.mkdir()
    assert "exists already" in message(str(run), str(there))
    assert "has no checkpoint 'rl-000009'; its checkpoints are: supervised-000012, " in message(
        str(run), target, "--checkpoint", "rl-000009"
    )
    assert "has no checkpoint '../run'" in message(str(run), target, "--checkpoint", "../run")
    assert "config.yaml: cannot be read: No such file" in message(str(there), target)
    weights = run / "checkpoints" / LAST / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= 1e6
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "model.safetensors: must have SHA-256 " in message(str(run), target)
    write_manifest(weights.parent, _digest(run))
    check_manifest(weights.parent)
    assert "`model.norm.weight` has values that are not finite in float16" in message(
        str(run), target, "--dtype", "float16"
    )
    assert not Path(target).exists()


def _digest(run: Path) -> str:
    manifest = run / "checkpoints" / "supervised-000012" / "manifest.json"
    digest: str = json.loads(manifest.read_text(encoding="utf-8"))["config"]
    return digest
