"""`compile: true` of a run, wherever its model comes from."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fastrl.training.phases import StepResult
from tests.helpers.runs import begin_phase, tiny_context

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
