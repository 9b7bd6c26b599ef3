"""Tensors of a run name their device: where the model is on a GPU, so is all that meets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.cli import main
from fastrl.training.llama_model import LlamaModel
from fastrl.training.phases import Phase
from fastrl.training.sampler import Sampler
from fastrl.training.saving import CheckpointSaver
from tests.helpers.runs import write_tiny


def test_sampling_evaluation_and_updates_use_no_default_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor on the default device, which is `meta` here, fails where it meets one of the CPU."""
    calls = set()

    def on_meta(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.add(name)
            with torch.device("meta"):
                return function(*args, **kwargs)

        return run

    replaced = (
        (Sampler, "_sample_batch"),
        (Phase, "_update"),
        (LlamaModel, "logprobs"),
        (LlamaModel, "frozen_copy"),
        (CheckpointSaver, "save"),
    )
    for holder, name in replaced:
        monkeypatch.setattr(holder, name, on_meta(name, getattr(holder, name)))
    command = ["train", str(write_tiny(tmp_path)), "--run-dir", str(tmp_path / "run")]
    overrides = [
        "phases.0.steps=2",
        "phases.1.steps=2",
        "phases.1.rollouts.old_logprobs=recompute",
        "phases.1.losses.policy.kl.coefficient=0.1",
        "phases.1.losses.policy.entropy.bonus=0.01",
    ]
    assert main([*command, *overrides]) == 0
    assert calls == {name for _, name in replaced}
