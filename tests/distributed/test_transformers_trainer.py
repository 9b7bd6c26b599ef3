"""`fastrl train` with a model of transformers under torchrun: the run of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastrl.config.training import ReshardAfter
from fastrl.integrations.transformers.compiled import compile_layers
from fastrl.integrations.transformers.trained import TransformersModel
from fastrl.models.parallelize import fully_shard_layers
from fastrl.parallel import ParallelGroups, whole_tensor
from fastrl.training.checkpoint import latest_checkpoint
from tests.helpers.killed_runs import check_same, forks, score_here, train_on_ranks
from tests.helpers.ranks import RankPool, rank_mesh
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
    "fsdp2_update": (
        [*FSDP2, "parallel.reshard_after=update", "phases.1.max_tokens_per_micro_batch=60"],
        {},
    ),
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
    _check_close(two, one)


def _with_an_expert_that_no_token_chose(
    reshard_after: ReshardAfter, is_compiled: bool = False
) -> list[float]:
    """Sizes of all parameters after two updates of two micro-batches."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    module.model.layers[1].expert = nn.Linear(16, 16, bias=False)
    if is_compiled:
        compile_layers(module.model.layers, backend="aot_eager")
    mesh = rank_mesh(torch.distributed.get_world_size(), 1, 1)["data"]
    fully_shard_layers(module, module.model.layers, mesh, None, reshard_after)
    model = object.__new__(TransformersModel)
    model.module, model.groups = module, ParallelGroups()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(2):
            module(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False).logits.sum().backward()
        model.reduce_gradients()
        assert all(isinstance(each.grad, DTensor) for each in module.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [float(whole_tensor(each).double().norm()) for each in module.parameters()]


@pytest.mark.parametrize("size", [1, 2])
def test_an_update_is_the_same_however_long_weights_stay_gathered(
    ranks: RankPool, size: int
) -> None:
    expected, *others = (
        ranks(_with_an_expert_that_no_token_chose, size, reshard_after, is_compiled)[0]
        for reshard_after, is_compiled in (
            ("forward", False),
            ("backward", False),
            ("update", False),
            ("forward", True),
            ("update", True),
        )
    )
    for found in others:
        assert found == pytest.approx(expected, rel=1e-6)


def _check_close(run: Path, expected_run: Path) -> None:
    for found, expected in zip(_metrics(run), _metrics(expected_run), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    folders = latest_checkpoint(run), latest_checkpoint(expected_run)
    files = [sorted(str(p.relative_to(f)) for p in f.rglob("*.safetensors")) for f in folders]
    assert files[0] == files[1]
    for file in files[0]:
        weights, expected_weights = (load_file(folder / file) for folder in folders)
        assert weights.keys() == expected_weights.keys()
        for key, weight in expected_weights.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-4, atol=1e-6)


def _stopped(whole: Path, run: Path, checkpoint: str) -> Path:
    """A copy of a run that was stopped at a checkpoint."""
    shutil.copytree(whole, run)
    (run / "checkpoints" / "latest").write_text(checkpoint, encoding="utf-8")
    return run


@forks
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("model", [{}, LORA], ids=["weights", "lora"])
def test_a_sharded_run_goes_on_over_as_many_processes_and_over_others(
    tmp_path: Path, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From bf16, whose fp32 masters are files of their own; in both phases, with a reference."""
    score_here(monkeypatch)
    folder = write_folder(tmp_path / "model", "qwen3", torch.bfloat16)
    config = str(write_run(folder, **model))
    options = [config, *OPTIONS, "phases.0.steps=2", "dtype=float32", "checkpoint.every=1"]
    options += ["checkpoint.keep=9"]
    whole = tmp_path / "whole"
    assert train_on_ranks(2, whole, *options, *FSDP2) == [0, 0], _output(whole)
    again = _stopped(whole, tmp_path / "again", "rl-000003")
    assert train_on_ranks(2, again, *options, *FSDP2) == [0, 0], _output(again)
    check_same(again, whole)
    one = _stopped(whole, tmp_path / "one", "supervised-000001")
    assert train_on_ranks(1, one, *options) == [0], _output(one)
    _check_close(one, whole)
    back = _stopped(one, tmp_path / "back", "rl-000003")
    assert train_on_ranks(2, back, *options, *FSDP2) == [0, 0], _output(back)
    _check_close(back, whole)


def _output(run: Path) -> str:
    return run.with_suffix(".out").read_text(encoding="utf-8")
