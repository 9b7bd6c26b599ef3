"""`fastrl train` in which rank 1 is killed in its third step, but not after torchrun's restart."""

import os
import signal
import sys

import pytest

from fastrl.cli import main
from fastrl.training.phases import Phase, StepResult
from tests.helpers.killed_runs import score_here

_step = Phase.step
_steps = 0


def _killed_step(phase: Phase) -> StepResult:
    global _steps
    _steps += 1
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], _steps) == ("1", "0", 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return _step(phase)


if __name__ == "__main__":
    Phase.step = _killed_step  # type: ignore[assignment, method-assign]
    score_here(pytest.MonkeyPatch())
    sys.exit(main(sys.argv[1:]))
