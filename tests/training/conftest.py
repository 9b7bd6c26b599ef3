"""One finished run for the tests that only look at it."""

import pytest

from fastrl.cli import main
from tests.helpers.runs import FinishedRun, write_tiny


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("finished")
    config = write_tiny(folder)
    out = folder / "out.txt"
    with pytest.MonkeyPatch.context() as patch, out.open("w", encoding="utf-8") as file:
        patch.setattr("sys.stdout", file)
        overrides = ["logging.tensorboard=true", "logging.report=true", "evaluation.every=2"]
        code = main(["train", str(config), "--run-dir", str(folder / "run"), *overrides])
    return FinishedRun(config, folder / "run", code, out.read_text(encoding="utf-8"))
