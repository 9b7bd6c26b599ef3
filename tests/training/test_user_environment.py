"""Environments of one's own: what is asked of the class, and what a mistake in it is told as."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.config import UserError, parse_config
from fastrl.config.environment import PythonEnvironmentConfig
from fastrl.training.environment import RunEnvironment
from fastrl.training.resume import with_inputs
from fastrl.training.trainer_state import TrainerState
from tests.helpers.runs import write_tiny

TASK = '''
from fastrl import Problem

class Sums:
    """Sums of two digits, the same ones for both splits."""

    def __init__(self, seed, largest=9):
        self.largest = largest + 0 * seed

    def problems(self, split):
        for a in range(self.largest + 1):
            for b in range(self.largest + 1):
                yield Problem(f"{a}+{b}=", str(a + b), data=a + b)

    def score(self, problem, answer):
        return float(answer is not None and int(answer) == problem.data)
'''


def _config(folder: Path, old: str = "", new: str = "", **values: Any) -> PythonEnvironmentConfig:
    path = folder / "sums.py"
    assert old in TASK
    path.write_text(TASK.replace(old, new) if old else TASK, encoding="utf-8")
    sizes = {"train_prompts": 200, "heldout_prompts": 20}
    return parse_config(PythonEnvironmentConfig, {"path": f"{path}:Sums"} | sizes | values)


def test_a_class_gives_problems_and_rewards(tmp_path: Path) -> None:
    environment = RunEnvironment(_config(tmp_path, config={"largest": 4}), seed=0)
    prompts = [[p.prompt for p in ps] for ps in (environment.heldout, environment.train)]
    # 25 problems, the same for both splits: the first 20 are held out.
    every = [f"{a}+{b}=" for a, b in itertools.product(range(5), repeat=2)]
    assert prompts == [every[:20], every[20:]]
    problems = environment.train[:1] * 4
    assert environment.score(problems, ["4", "5", "x", None]).rewards == [1, 0, 0, 0]
    assert environment.score(problems, ["4", "5", "x", None]).metrics["score_errors"] == 1


def test_problems_without_end_are_drawn_as_many_as_the_config_says(tmp_path: Path) -> None:
    endless = "for a in __import__('itertools').count():"
    config = _config(tmp_path, "for a in range(self.largest + 1):", endless, train_prompts=50)
    environment = RunEnvironment(config, seed=0)
    assert (len(environment.heldout), len(environment.train)) == (20, 30)


def test_a_class_may_be_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path)
    package = tmp_path / "counting_package"
    package.mkdir()
    (tmp_path / "sums.py").rename(package / "sums.py")
    monkeypatch.syspath_prepend(tmp_path)
    moved = config.model_copy(update={"path": "counting_package.sums:Sums"})
    assert len(RunEnvironment(moved, seed=0).train) == 80


ARGUMENTS = "def score(self, problem, answer):"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class Sums", "class Sum", "sums.py` has no class `Sums`; did you mean `Sum`?"),
        ("class Sums:", "class Sums", "SyntaxError: expected ':'"),
        ("class Sums:", "1 / 0\nclass Sums:", "sums.py, line 4)"),
        ("import Problem", "import Problems", "ImportError: cannot import name"),
        ("import Problem", "import Problem\nimport nosuchthing", "No module named 'nosuchthing'"),
        (", largest=9", "", "sums.py:Sums: `__init__` raised NameError: name 'largest' is not"),
        ("seed, largest", "largest", "raised TypeError: Sums.__init__() got an unexpected keyword"),
        ("problems(self, split)", "problem(self, split)", "must have a method `problems(self, "),
        ("problems(self, split)", "problems(self)", "method `problems(self, split)`, got `problem"),
        (ARGUMENTS, "def score(self, answer):", "method `score(self, problem, answer)`, got `scor"),
        ("yield Problem(f", "yield str(f", "`problems` raised TypeError: 'data' is an invalid key"),
        ('f"{a}+{b}="', "a", "`problems` raised TypeError: `Problem.prompt` must be text, got 0"),
        (", str(a + b)", ", a + b", "raised TypeError: `Problem.answer` must be text or None, go"),
        ("yield Problem(f", "yield 3 #", "`problems` must yield `fastrl.Problem`, got 3"),
        ("range(self", "range(-1 - self", "must be at most 0 here, the different prompts among 0"),
    ],
)
def test_a_mistake_in_the_class_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    environment = _config(tmp_path, old, new).model_dump()
    config = write_tiny(tmp_path, {"environment": environment})
    before = sorted(tmp_path.rglob("*.*"))
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "sums.py" in error
    assert error.count("\n") == 1
    assert [path for path in sorted(tmp_path.rglob("*.*")) if "pycache" not in str(path)] == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("sums:", "must read `FILE.py:CLASS` or `PACKAGE.MODULE:CLASS`, got 'sums:'"),
        ("sums.py", "must read `FILE.py:CLASS` or `PACKAGE.MODULE:CLASS`, got 'sums.py'"),
        (
            "nowhere/sums.py:Sums",
            "there is no file `nowhere/sums.py`; paths are relative to the current",
        ),
        ("nosuchpackage.sums:Sums", "there is no module `nosuchpackage.sums`; install its package"),
        ("json:Sums", "`json` has no class `Sums`"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        RunEnvironment(parse_config(PythonEnvironmentConfig, {"path": path}), seed=0)
    assert message in str(caught.value)


def test_the_seed_is_the_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must not have \['seed'\], which follows from the run"):
        _config(tmp_path, config={"seed": 1})


class _OtherProcess:
    """Another process of the run, whose problems have this digest."""

    size, rank = 1, 0

    def __init__(self, digest: str) -> None:
        self._digest = digest

    def gather(self, value: str) -> list[str]:
        return [value, self._digest or value]


def test_processes_must_have_the_same_problems(tmp_path: Path) -> None:
    config = _config(tmp_path)
    RunEnvironment(config, 0, _OtherProcess("")).close()  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the same problems in the same order on all processes"):
        RunEnvironment(config, 0, _OtherProcess("other"))  # type: ignore[arg-type]


def test_a_run_goes_on_with_the_problems_it_began_with(
    tmp_path: Path,
) -> None:
    environment = RunEnvironment(_config(tmp_path), 0)
    context: Any = SimpleNamespace(environment=environment, processes=_OtherProcess(""))
    began = with_inputs(TrainerState(), context, {}, tmp_path)
    assert began.problems == environment.digest
    assert with_inputs(began, context, {}, tmp_path) == began
    with pytest.raises(UserError, match="goes on with the problems it began with"):
        with_inputs(replace(began, problems="0" * 64), context, {}, tmp_path)
