"""`compile: true` of a run, wherever its model comes from."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fastrl.training.context import build_context
from fastrl.training.phases import StepResult
from tests.helpers.runs import begin_phase, tiny_context
from tests.helpers.transformers_runs import run_config, write_folder

# Of the tracing itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def _step(*overrides: str) -> tuple[StepResult, dict[str, torch.Tensor]]:
    config, context = tiny_context(*overrides)
    phase = begin_phase(config, 0, context)
    return phase.step(), context.model.module.state_dict()


@pytest.mark.parametrize("checkpointing", ["none", "attention"])
def test_a_compiled_run_is_the_run(checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    option = f"model.activation_checkpointing={checkpointing}"
    expected, expected_weights = _step(option)
    assert counter.frame_count == 0
    result, weights = _step(option, "compile=true")
    assert counter.frame_count > 0
    torch.testing.assert_close(weights, expected_weights, rtol=1e-9, atol=1e-12)
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12)


LORA = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}}


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize(
    ("family", "model", "dtype"),
    [
        ("qwen3", {}, "float64"),
        ("llama", LORA, "float64"),
        ("gpt2", {}, "float64"),
        ("opt", {}, "float64"),
        ("mixtral", {}, "float32"),  # whose experts have no float64
    ],
    ids=["qwen3", "lora", "gpt2", "padded", "mixtral"],
)
def test_a_compiled_run_of_a_model_of_transformers_is_the_run(
    tmp_path: Path,
    family: str,
    model: dict[str, Any],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sampling, a reference and updates of several micro-batches among it."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    folder = write_folder(tmp_path / "model", family)
    overrides = [
        f"dtype={dtype}",
        # Whatever the rewards are, it learns.
        "phases.1.losses={policy: {type: gspo, kl: {coefficient: 0.1}, entropy: {bonus: 0.1}}}",
        "phases.1.optimizer.learning_rate=0.1",
        "phases.1.max_tokens_per_micro_batch=60",
        "phases.1.optimizer.epsilon=1e-2",
    ]

    def second_step(*more: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        config = run_config(folder, "transformers", *overrides, *more, **model)
        context = build_context(config)
        assert context.environment is not None
        with closing(context.environment):
            phase = begin_phase(config, 1, context)
            phase.step()
            return phase.step().metrics, context.model.module.state_dict()

    expected, expected_weights = second_step()
    assert counter.frame_count == 0
    # The model learns, and its reference stays what it was.
    assert min(expected["grad_norm"], expected["policy/kl_ref"]) > 0
    metrics, weights = second_step("compile=true")
    # One number of tokens, then any, with gradient and without: not one a layer or a batch.
    assert 0 < counter.frame_count <= 8
    rtol, atol = (1e-7, 1e-10) if dtype == "float64" else (1e-4, 1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=rtol, atol=atol)
    assert metrics == pytest.approx(expected, rel=10 * rtol, abs=10 * atol)
