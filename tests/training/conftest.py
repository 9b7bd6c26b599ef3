"""One finished run for the tests that only look at it, and rewards to learn from."""

from collections.abc import Sequence

import pytest

from fastrl.cli import main
from fastrl.environments import Problem
from fastrl.training.environment import RunEnvironment, Scores
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


@pytest.fixture
def lively_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model is never right: rewards that differ between any two answers."""

    def score(
        _: RunEnvironment, problems: Sequence[Problem], answers: Sequence[str | None]
    ) -> Scores:
        pairs = zip(problems, answers, strict=True)
        texts = [problem.prompt + str(answer) for problem, answer in pairs]
        return Scores([sum(map(ord, text)) % 7 / 6 for text in texts], {})

    monkeypatch.setattr(RunEnvironment, "score", score)
