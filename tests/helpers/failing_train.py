"""`fastrl train` in which rank 1 raises in its third step, for `test_trainer.py`."""

import os
import sys

from fastrl.cli import main
from fastrl.training.phases import Phase, StepResult

_step = Phase.step


def _failing_step(phase: Phase) -> StepResult:
    if os.environ["RANK"] == "1" and phase.steps_done == 2:
        raise RuntimeError("a fault of rank 1 alone")
    return _step(phase)


if __name__ == "__main__":
    Phase.step = _failing_step  # type: ignore[assignment, method-assign]
    sys.exit(main(sys.argv[1:]))
