"""Losses, gradients and metrics of small heads, and the numbers of a small run, at fixed seeds.

A gradient is written as the SHA-256 of its bytes, which says whether a digit moved, with two
numbers that other machines can compare: its norm, and its product with a fixed vector.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastrl import BatchKwargs, Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
from fastrl.cli import main
from fastrl.config import AnyLossConfig, PolicyGradientLossConfig
from fastrl.data.preferences import preference_pairs
from fastrl.layers.losses import reduce_metrics
from tests.surface.interface import members

VOCAB_SIZE, HIDDEN_SIZE = 37, 8
UPSTREAM = 1.7

POLICY_OPTIONS: dict[str, Any] = {
    "kl": {"coefficient": 0.3},
    "rollout_correction": {"high": 1.05},
    "off_policy_mask": {"threshold": 0.05, "behaviour": "rollout"},
    "max_staleness": 2,
    "entropy": {"bonus": 0.1, "top_fraction": 0.8, "adaptive": {"target": 1.0}},
}
GRPO = {"policy": {"type": "grpo"}}
MORE = {"bias": True, "softcap": 3.0, "logit_scale": 0.8, "padded_vocab_size": 40}
CHUNKS = {"strategy": "single_pass", "chunk_size": 7}

# Heads by name: losses and options. Those of fp32 say so in their names.
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (GRPO, {"strategy": "recompute"}),
    "grpo, fp32": (GRPO, {"strategy": "recompute"}),
    "grpo in chunks": (GRPO, CHUNKS),
    "grpo in chunks, fp32": (GRPO, CHUNKS),
    "gspo in chunks, capped, fp32": ({"policy": {"type": "gspo"}}, MORE | CHUNKS),
    "cispo with kl": ({"policy": {"type": "cispo", "kl": {"coefficient": 0.2}}}, CHUNKS),
    "dpo": ({"pairs": {"type": "dpo"}}, {}),
    "jensen_shannon": ({"x": {"type": "distillation", "divergence": "jensen_shannon"}}, MORE),
    "reverse_kl, fp32": ({"x": {"type": "distillation", "divergence": "reverse_kl"}}, {}),
    "top_k": (GRPO, {"keep": {"top_k": 9}}),
    "top_p and min_p, fp32": (GRPO, {"keep": {"top_p": 0.9, "min_p": 0.02}}),
    "recorded": (GRPO, {"keep": {"recorded": True}}),
    "smoothed": ({"x": {"type": "cross_entropy", "label_smoothing": 0.1}}, MORE),
    "two scales": (
        {"x": {"type": "cross_entropy", "logits_scale": 0.5}, "z": {"type": "z_loss"}, **GRPO},
        MORE | {"chunk_size": 7, "drop_inactive_rows": True, "strategy": "recompute"},
    ),
    "all options, fp32": ({"policy": {"type": "grpo", "preset": "dapo", **POLICY_OPTIONS}}, MORE),
}

RUN = """
seed: 4
device: cpu
dtype: float64
num_threads: 1
model: {type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
  initializer_range: 0.2}
tokenizer: {type: character, characters: "0123456789+-= "}
environment:
  type: reasoning_gym
  task: chain_sum
  config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  question_pattern: ": (.*)$"
  train_prompts: 200
  heldout_prompts: 32
sampler: {max_new_tokens: 3}
phases:
  - type: supervised
    steps: 2
    documents_per_step: 64
    losses: {answers: {type: cross_entropy}}
    optimizer: {learning_rate: 3e-2, warmup_updates: 1, schedule: cosine}
  - type: rl
    steps: 2
    losses: {policy: {type: grpo, entropy: {bonus: 0.01}}}
    optimizer: {learning_rate: 3e-3}
    mini_batches: 2
    rollouts: {type: sampler, prompts_per_step: 6, group_size: 8}
logging: {samples_every: 1, num_samples: 1, tensorboard: false, report: false}
"""


def machine() -> dict[str, str]:
    """What the last digits of sums on a CPU depend on, and what the problems of a run come from."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "processor": models[0] if models else platform.processor(),
        "reasoning-gym": version("reasoning-gym"),
    }


def heads() -> dict[str, dict[str, Any]]:
    """Each head with its loss, the gradients and the names of its metrics."""
    return {name: _head(name, *case) for name, case in HEADS.items()}


def losses() -> dict[str, dict[str, Any]]:
    """Each loss, bare and with all that adds metrics: the loss, its gradients and all metrics."""
    results = {}
    for kind in members(AnyLossConfig):
        if "type" not in kind.model_fields:  # stands for losses of the user's own
            continue
        name = kind.model_fields["type"].default
        variants: dict[str, dict[str, Any]] = {name: {}}
        if issubclass(kind, PolicyGradientLossConfig):
            options = dict(POLICY_OPTIONS)
            if name == "reinforce":
                options["kl"] = {"coefficient": 0.3, "gradient": "straight_through"}
            if name == "vespo":
                del options["rollout_correction"]
            variants[f"{name}, all options"] = options
        for variant, options in variants.items():
            results[variant] = _head(variant, {"a": {"type": name, **options}}, {})
    # The columns that the loss needs and no others.
    batch = _batch(["advantages", "old_logprobs"]).replace(current_version=None, rewards=None)
    results["grpo, few columns"] = _head("grpo", {"a": {"type": "grpo"}}, {}, batch)
    # Documents of ratios beyond where exponentials saturate.
    batch = _batch()
    assert batch.old_logprobs is not None
    far = -40.0 * (batch.document_index == 0) + 40.0 * (batch.document_index == 3)
    batch = batch.replace(old_logprobs=batch.old_logprobs + far)
    results["vespo, far away"] = _head("vespo", {"a": {"type": "vespo"}}, {}, batch)
    results["grpo, far away"] = _head("grpo", {"a": {"type": "grpo"}}, {}, batch)
    return results


def _head(
    name: str, losses: dict[str, Any], options: dict[str, Any], batch: BatchKwargs | None = None
) -> dict[str, Any]:
    is_preference = any(loss["type"] == "dpo" for loss in losses.values())
    if batch is None:
        batch = _batch(pairs=is_preference)
    dtype = torch.float32 if name.endswith("fp32") else torch.float64
    columns = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    given = {column: getattr(batch, column) for column in columns}
    batch = batch.replace(**{key: x.to(dtype) for key, x in given.items() if x is not None})
    config = {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE, "losses": losses, **options}
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config), dtype=dtype)
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            parameter.copy_(_normal(number, *parameter.shape) * 0.3)
    hidden = _normal(11, batch.tokens.shape[0], HIDDEN_SIZE).to(dtype).requires_grad_()
    teacher = None
    if any(loss["type"] == "distillation" for loss in losses.values()):
        # The type of a teacher has no name in `fastrl`; the head's parameter says what it is.
        kind = next(iter(get_args(get_type_hints(LanguageModelHead.forward)["teacher"])))
        rows = head.weight.shape[0]
        weight = _normal(13, rows, 5).to(dtype)
        teacher = kind(_normal(12, len(hidden), 5).to(dtype), weight, softcap=4.0)
    output = head(hidden, batch, teacher=teacher)
    (output.loss * UPSTREAM).backward()
    gradients = {"hidden_states": hidden.grad}
    gradients |= {key: parameter.grad for key, parameter in head.named_parameters()}
    metrics = reduce_metrics(output.metrics, head.loss_groups)
    return {
        "strategy": output.strategy,
        "loss": output.loss.item(),
        "gradients": {key: _tensor(value) for key, value in gradients.items()},
        "metrics": {key: metrics[key].item() for key in sorted(metrics)},
    }


def _batch(columns: list[str] | None = None, *, pairs: bool = False) -> BatchKwargs:
    """Documents of several lengths and temperatures, with every column, and padding."""
    random = np.random.default_rng(5)

    def near(centre: float, scale: float, size: int) -> list[float]:
        values = np.minimum(centre + scale * random.standard_normal(size), -0.01)
        return [round(float(value), 4) for value in values]

    documents = []
    for number, (length, prompt_length) in enumerate([(7, 2), (5, 4), (9, 1), (4, 1), (6, 3)] * 2):
        size = length - prompt_length
        tokens = random.integers(VOCAB_SIZE, size=length).tolist()
        document = Document(
            tokens,
            prompt_length=prompt_length,
            logprobs=near(-3.6, 0.4, size),
            ref_logprobs=near(-3.6, 0.4, size),
            rollout_logprobs=near(-3.6, 0.4, size),
            advantage=(1.0, -0.75, 0.0, -1.25, 0.5)[number % 5],
            temperature=(0.7, 1.0, 1.3)[number % 3],
            model_version=4 + number % 4,
            reward=None if number == 1 else 0.25 * number,
            group_id=number // 2,
            kept_tokens=[[token, (token + 3) % VOCAB_SIZE, 1] for token in tokens[prompt_length:]],
        )
        documents.append(document)
    if pairs:
        documents = [replace(document, temperature=1.0) for document in documents]
        documents = preference_pairs(list(zip(documents[::2], documents[1::2], strict=True)))
    packed = TokenBatch.from_documents(documents, pad_to_multiple=16, columns=columns)
    (batch,) = packed.to_kwargs()
    return batch.replace(current_version=7)


def _normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers of few digits, equal on all machines; float64."""
    values = np.random.default_rng(seed).standard_normal(shape).round(4)
    return torch.from_numpy(values)


def _tensor(tensor: Tensor | None) -> dict[str, Any]:
    assert tensor is not None
    array = tensor.detach().contiguous().numpy()
    values = array.astype(np.float64).ravel()
    product = values * np.cos(np.arange(values.size))
    return {
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
        "norm": math.sqrt(math.fsum(values**2)),
        "product": math.fsum(product),
    }


def run(folder: Path) -> dict[str, Any]:
    """The metrics of each step of a run of two phases, its files and its final weights."""
    config, run_dir = folder / "run.yaml", folder / "run"
    config.write_text(RUN, encoding="utf-8")
    assert main(["train", str(config), "--run-dir", str(run_dir)]) == 0
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    records = {}
    for number, line in enumerate((run_dir / "metrics.jsonl").read_text("utf-8").splitlines()):
        record = json.loads(line)
        timed = {"seconds": None, "tokens_per_second": None}
        records[f"line {number}"] = record | {key: timed[key] for key in timed if key in record}
    samples = (run_dir / "samples.jsonl").read_text("utf-8").splitlines()
    weights = load_file(max(run_dir.glob("checkpoints/rl-*")) / "model.safetensors")
    return {
        "files": sorted(str(path.relative_to(run_dir)) for path in files),
        "metrics": records,
        "samples": {f"line {number}": json.loads(line) for number, line in enumerate(samples)},
        "weights": {name: _tensor(weight) for name, weight in sorted(weights.items())},
    }
