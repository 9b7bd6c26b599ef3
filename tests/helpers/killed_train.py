"""`fastrl train` that is killed while it writes its second checkpoint, a step further on."""

import os
import signal
import sys
import threading
from typing import Any

from fastrl.cli import main
from fastrl.training import checkpoint
from fastrl.training.manifest import write_manifest
from fastrl.training.phases import Phase, StepResult

_step = Phase.step
_further = threading.Event()
_written: list[None] = []


def _stepped(phase: Phase) -> StepResult:
    result = _step(phase)
    if _written:  # the first checkpoint
        _further.set()
    return result


def _killed(*arguments: Any) -> None:
    if _written:
        _further.clear()
        _further.wait(20)
        os.kill(os.getpid(), signal.SIGKILL)
    _written.append(None)
    write_manifest(*arguments)


if __name__ == "__main__":
    Phase.step = _stepped  # type: ignore[assignment, method-assign]
    checkpoint.write_manifest = _killed  # type: ignore[assignment, attr-defined]
    sys.exit(main(sys.argv[1:]))
