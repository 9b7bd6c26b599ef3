"""`fastrl train` with a model of transformers under torchrun: the run of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastrl.training.checkpoint import latest_checkpoint
from tests.helpers.torchrun import torchrun
from tests.helpers.transformers_runs import write_folder, write_run

OPTIONS = (
    "phases.0.steps=3",
    "phases.1.steps=2",
    "environment.heldout_prompts=4",
    "phases.1.losses={policy: {type: gspo, kl: {coefficient: 0.1}}}",
    "phases.0.optimizer.epsilon=1e-3",
    "phases.1.optimizer.epsilon=1e-3",
)
FSDP2 = ["parallel.data=2", "parallel.fully_sharded=true"]
LORA = {"lora": {"rank": 3, "target_modules": ["q_proj", "v_proj"]}}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "replicas": (["parallel.data=2"], {}),
    "fsdp2": (FSDP2, {}),
    "fsdp2_lora": (FSDP2, LORA),
}


def _metrics(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    names = ("loss", "grad_norm", "reward", "policy/kl_ref", "heldout/reward")
    return [{k: v for k, v in json.loads(line).items() if k in names} for line in lines]


@pytest.mark.parametrize("name", CASES)
def test_a_run_over_processes_is_that_of_one(tmp_path: Path, name: str) -> None:
    layout, model = CASES[name]
    config = str(write_run(write_folder(tmp_path / "model", "qwen3"), **model))
    one, two = tmp_path / "one", tmp_path / "two"
    assert torchrun(1, "fastrl", "train", config, "--run-dir", str(one), *OPTIONS).returncode == 0
    done = torchrun(2, "fastrl", "train", config, "--run-dir", str(two), *OPTIONS, *layout)
    assert done.returncode == 0, done.stderr
    for found, expected in zip(_metrics(two), _metrics(one), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    folders = latest_checkpoint(two), latest_checkpoint(one)
    files = [sorted(str(p.relative_to(f)) for p in f.rglob("*.safetensors")) for f in folders]
    assert files[0] == files[1]
    for file in files[0]:
        weights, expected_weights = (load_file(folder / file) for folder in folders)
        assert weights.keys() == expected_weights.keys()
        for key, weight in expected_weights.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-4, atol=1e-6)
