"""A run that takes seconds: its config, and how tests start it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastrl.config import RunConfig, parse_config
from fastrl.config.yaml_text import dump_yaml, parse_yaml
from fastrl.training.checkpoint import latest_checkpoint
from fastrl.training.context import RunContext, build_context
from fastrl.training.phases import Phase
from fastrl.training.rollout_sources import build_sources

TINY = """
seed: 3
dtype: float64
model: {type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
  initializer_range: 0.2}
tokenizer: {type: character, characters: "0123456789+-= "}
environment:
  type: reasoning_gym
  task: chain_sum
  config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  question_pattern: ": (.*)$"
  train_prompts: 300
  heldout_prompts: 16
sampler: {max_new_tokens: 3}
phases:
  - type: supervised
    steps: 12
    documents_per_step: 32
    losses: {answers: {type: cross_entropy}}
    optimizer: {learning_rate: 1e-2, warmup_updates: 3, schedule: cosine}
  - type: rl
    steps: 4
    losses: {policy: {type: grpo}}
    optimizer: {learning_rate: 3e-3}
    mini_batches: 2
    rollouts: {type: sampler, prompts_per_step: 6, group_size: 4}
logging: {samples_every: 2, num_samples: 2, tensorboard: false, report: false}
"""


FEW_STEPS = [
    *("phases.0.steps=2", "phases.0.documents_per_step=4", "phases.1.steps=2"),
    *("phases.1.mini_batches=1", "phases.1.rollouts.prompts_per_step=2"),
    *("environment.heldout_prompts=2", "environment.train_prompts=20"),
    *("checkpoint.every=1", "evaluation.every=1", "logging.samples_every=1"),
]
"""Overrides for a run of four steps that writes all it can after each."""


class FinishedRun(NamedTuple):
    """A run that the command line made."""

    config: Path
    folder: Path
    exit_code: int
    out: str


def tiny(*overrides: str) -> RunConfig:
    """The config with some changes."""
    return parse_config(RunConfig, parse_yaml(TINY), overrides)


def tiny_context(*overrides: str) -> tuple[RunConfig, RunContext]:
    """The config and what is built from it."""
    config = tiny(*overrides)
    return config, build_context(config)


def begin_phase(config: RunConfig, index: int, context: RunContext) -> Phase:
    """A phase at its first step, whatever the phases before it have done to the model."""
    return Phase(config, index, context, build_sources(config, context, first=index)[index])


def write_tiny(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """The config as a file in `folder`, with some top-level keys replaced."""
    path = folder / "tiny.yaml"
    path.write_text(dump_yaml(parse_yaml(TINY) | (changes or {})), encoding="utf-8")
    return path


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's latest checkpoint."""
    from safetensors.torch import load_file

    return load_file(latest_checkpoint(run_dir) / "model.safetensors")
