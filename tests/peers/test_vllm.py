"""A real vLLM on the CPU: it samples for a run, and reads its checkpoints.

FASTRL_VLLM=path/to/bin/vllm python -m pytest tests/peers/test_vllm.py -s

needs vLLM in an environment of its own, and some ten minutes on two cores; -s shows the numbers.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.config import RunConfig, load_config
from fastrl.training.environment import RunEnvironment
from fastrl.training.log_files import iter_metrics
from tests.helpers.real_vllm import RealVllm

COMMAND = os.environ.get("FASTRL_VLLM", "")
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CONFIG = EXAMPLES / "server_grpo.yaml"
STEPS = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not COMMAND, reason="FASTRL_VLLM names no vLLM"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vllm")
    runpy.run_path(str(EXAMPLES / "make_model_folder.py"))["main"](
        "qwen3", made / "model", num_heads=2
    )
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealVllm]:
    started = RealVllm(COMMAND, folder / "model", folder / "vllm.log")
    started.start()
    yield started
    started.end()


def arguments(folder: Path, run: str, *more: str) -> list[str]:
    shorter = [f"phases.1.steps={STEPS}", "logging.report=false", "logging.tensorboard=false"]
    model = f"model.path={folder / 'model'}"
    return ["train", str(CONFIG), "--run-dir", str(folder / run), model, *shorter, *more]


def of_server(folder: Path, server: RealVllm, **options: Any) -> list[str]:
    rollouts = load_config(RunConfig, CONFIG).model_dump(mode="json")["phases"][1]["rollouts"]
    rollouts |= {"urls": [server.url], "weights": {"folder": str(folder / "served")}, **options}
    return [f"phases.1.rollouts={json.dumps(rollouts)}"]


def heldout(folder: Path, run: str) -> list[float]:
    records = list(iter_metrics(folder / run))
    return [record["heldout/reward"] for record in records if "heldout/reward" in record]


def test_a_run_learns_from_a_server_as_from_its_own_sampler(folder: Path, server: RealVllm) -> None:
    sampler = {"type": "sampler", "prompts_per_step": 16, "group_size": 8}
    no_versions = 'phases.1.losses={"policy": {"type": "grpo"}}'
    runs = {
        "sampler": [f"phases.1.rollouts={json.dumps(sampler)}", no_versions],
        "server": of_server(folder, server, ahead=0, old_logprobs="recompute"),
        "ahead": of_server(folder, server),
    }
    gains = {}
    for name, changes in runs.items():
        begin = time.monotonic()
        assert main(arguments(folder, name, *changes)) == 0
        _, before, after = heldout(folder, name)
        gains[name] = after - before
        print(f"{name}: {before:.3f} -> {after:.3f}, {time.monotonic() - begin:.0f} s")
    assert min(gains["server"], gains["ahead"]) > 0.5 * gains["sampler"] > 0.05
    # KL's k3 estimate is half of the mean squared difference of log-probabilities.
    squares = [
        each["policy/kl_rollout"]
        for each in iter_metrics(folder / "server")
        if "policy/kl_rollout" in each and each["phase"] == "grpo"
    ]
    worst = (2 * max(squares)) ** 0.5
    print(f"log-probabilities of trainer and server differ by {worst:.2g} (root mean square)")
    assert worst < 1e-3


def test_a_checkpoint_has_the_greedy_text_of_transformers(folder: Path, server: RealVllm) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = folder / "exported"
    assert main(["export", str(folder / "ahead"), str(exported)]) == 0
    ask(
        server,
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": str(exported)}},
    )
    ask(server, "/reset_prefix_cache", {})
    config = load_config(RunConfig, CONFIG)
    assert config.environment is not None
    prompts = [each.prompt for each in RunEnvironment(config.environment, 0).heldout[:64]]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    same = 0
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**ids, max_new_tokens=6, do_sample=False)
        wanted = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        body = {
            "model": str(folder / "model"),
            "prompt": ids["input_ids"][0].tolist(),
            "max_tokens": 6,
            "temperature": 0,
        }
        same += ask(server, "/v1/completions", body)["choices"][0]["text"] == wanted
    print(f"greedy text: {same} of {len(prompts)} prompts the same")
    assert same == len(prompts)


def ask(server: RealVllm, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def test_killing_the_server_ends_the_run_which_goes_on(folder: Path, server: RealVllm) -> None:
    changes = of_server(folder, server, retries=2)
    command = [sys.executable, "-m", "fastrl", *arguments(folder, "killed", *changes)]
    command.append("checkpoint.every=5")
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = folder / "killed" / "metrics.jsonl"
    while run.poll() is None and not (
        log.exists() and re.search('"step": 1[0-9]{2},', log.read_text(encoding="utf-8"))
    ):
        time.sleep(0.2)
    server.end()
    _, error = run.communicate(timeout=600)
    print(f"exit code {run.returncode}: {error.strip()}")
    assert run.returncode == 2
    assert error.startswith(f"fastrl: error: {server.url}: the server must answer")
    assert error.count("\n") == 1
    steps = [each["step"] for each in iter_metrics(folder / "killed") if "reward" in each]
    print(f"killed after step {steps[-1]}", end=", ")
    server.start()
    assert main([*command[3:], "--resume"]) == 0
    steps = [each["step"] for each in iter_metrics(folder / "killed") if "reward" in each]
    print(f"went on to step {steps[-1]}")
    assert steps == list(range(91, 91 + STEPS))
