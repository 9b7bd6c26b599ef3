"""Completions are scored in worker processes, which hang, die and lie without harm to the run."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.config import UserError, parse_config
from fastrl.config.environment import PythonEnvironmentConfig, ReasoningGymConfig
from fastrl.environments import Problem, pool
from fastrl.environments.pool import Outcomes, ScoringPool
from fastrl.training.environment import RunEnvironment
from tests.helpers.forked_workers import fork_workers
from tests.helpers.runs import write_tiny

# The tasks of reasoning-gym 0.1.25 whose verifiers evaluate the text of a completion.
EVALUATING = [
    "countdown",
    "puzzle24",
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
]

# A verifier that evaluates as those do, and says what it was given.
EVALUATING_TASK = """
import os, sys, time
from fastrl import Problem

class Task:
    def __init__(self, seed, words=None):
        self.words = None if words is None else open(words).read()

    def problems(self, split):
        while True:
            yield Problem(split)

    def score(self, problem, answer):
        return -1.0 if answer is None else eval(answer, globals() | {"task": self})
"""


def _pool(folder: Path, task: str = EVALUATING_TASK, **values: Any) -> ScoringPool:
    path = folder / "task.py"
    path.write_text(task, encoding="utf-8")
    defaults = {"path": f"{path}:Task", "workers": 1}
    config = parse_config(PythonEnvironmentConfig, defaults | values)
    pool = ScoringPool(config, 0)
    pool.set_probe(Problem(""))
    return pool


def _score(pool: ScoringPool, *answers: str | None) -> Outcomes:
    return pool.score([Problem("")] * len(answers), answers)


def _pids(pool: ScoringPool) -> list[int]:
    return [worker._process.pid for worker in pool._workers]


def _ends(pid: int) -> bool:
    """Whether a process ends within some seconds; one that nobody waits for has ended, too."""
    for _ in range(100):
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8"):
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.parametrize("task", EVALUATING)
def test_rl2_the_text_of_a_model_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket, task: str
) -> None:
    if task != EVALUATING[0]:  # for one task, workers are processes of their own
        fork_workers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "PWNED"
    port = listener.getsockname()[1]
    planted = [
        "open('PWNED','w')",
        f"open('{target}','w')",
        f"__import__('os').open('{target}', 64)",
        f"__import__('os').mkdir('{target}')",
        "__import__('os').system('touch PWNED')",
        f"__import__('os').system('touch {target}')",
        f"__import__('subprocess').run(['touch', '{target}'])",
        f"__import__('socket').create_connection(('127.0.0.1', {port}))",
        "[__import__('os').fork() for _ in range(30)]",
        f"__import__('os').kill({os.getpid()}, 9)",
        "__import__('os')._exit(0)",
        "exit()",
    ]
    config = parse_config(
        ReasoningGymConfig,
        {"task": task, "train_prompts": 4, "heldout_prompts": 2, "workers": 1},
    )
    environment = RunEnvironment(config, seed=0)
    problem = environment.heldout[0]
    scores = environment.score([problem] * (len(planted) + 2), [*planted, problem.answer, None])
    *rewards, own, none = scores.rewards
    assert rewards == [none] * len(planted)
    assert own > none or task == "intermediate_integration"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BlockingIOError):
        listener.accept()
    environment.close()


@pytest.mark.parametrize("text", ["9**9**9**9", "factorial(10**9)", "[0] * 10**12", "'a' * 10**11"])
def test_rl3_what_takes_too_long_or_too_much_counts_as_no_answer(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    if "**9" in text:  # no memory is bounded
        fork_workers(monkeypatch)
    values = {"task": "countdown", "train_prompts": 4, "heldout_prompts": 2, "workers": 1}
    config = parse_config(ReasoningGymConfig, values | {"limits": {"seconds": 1.0}})
    environment = RunEnvironment(config, seed=0)
    problem = environment.heldout[0]
    environment.start()
    begin = time.monotonic()
    scores = environment.score([problem] * 3, [problem.answer, text, problem.answer])
    assert time.monotonic() - begin < 1.0 + 20
    assert scores.rewards == [1.0, 0.01, 1.0]  # reasoning-gym: 0.01 for any answer and for none
    if text == "9**9**9**9":
        assert scores.metrics["score_timeouts"] == 1
    environment.close()


def test_rewards_are_in_order_whatever_workers_are_lost(tmp_path: Path) -> None:
    pool = _pool(tmp_path, workers=3, limits={"seconds": 1.0})
    answers: list[str | None] = [str(number) for number in range(200)]
    expected = [float(number) for number in range(200)]
    kinds = {"timeouts": (3, "time.sleep(9)"), "failures": (70, "os._exit(0)")}
    kinds["errors"] = (130, "1 / 0")
    for number, text in kinds.values():
        answers[number], expected[number] = text, -1.0
    answers[199], expected[199] = None, -1.0
    outcomes = _score(pool, *answers)
    assert outcomes.rewards == expected
    found = {kind: getattr(outcomes, kind) for kind in kinds}
    assert found == {kind: {number} for kind, (number, _) in kinds.items()}
    assert _score(pool, "0.5").rewards == [0.5]
    pool.close()


@pytest.mark.parametrize(
    "text",
    [
        "task.missing",
        "'1'",
        "None",
        "float('nan')",
        "10.0**308 * 10",
        "sys.exit()",
        "(_ for _ in ()).throw(KeyboardInterrupt)",
        "b'0' * 10**11",
        "(lambda f: f(f))(lambda f: f(f))",
        "input()",
    ],
)
def test_an_answer_at_which_the_environment_fails_is_none_and_counted(
    tmp_path: Path, text: str
) -> None:
    pool = _pool(tmp_path)
    outcomes = _score(pool, "0.5", text, "0.25")
    assert outcomes.rewards == [0.5, -1.0, 0.25]
    assert (outcomes.errors, outcomes.timeouts, outcomes.failures) == ({1}, set(), set())
    pool.close()


@pytest.mark.parametrize(
    "data", [r"b'\xff' * 90", r"b'\x02\x02' + bytes(7) + b'\xff' * 8", "b'x' * 10**4"]
)
def test_a_worker_that_answers_garbage_is_replaced(tmp_path: Path, data: str) -> None:
    """A kind that is not there, a reward that is not finite, and many answers."""
    pool = _pool(tmp_path)
    outcomes = _score(pool, "0.5", f"os.write(int(sys.argv[1]), {data}) and 1", "0.25")
    assert outcomes.rewards == [0.5, -1.0, 0.25]
    assert outcomes.failures == {1}
    pool.close()


def test_a_worker_that_speaks_unasked_or_died_is_replaced(tmp_path: Path) -> None:
    pool = _pool(tmp_path)
    # Text that runs in the worker can forge its own reward, but not shift those that follow.
    twice = "os.write(int(sys.argv[1]), b'\\x02\\x01' + bytes(15)) and 1"
    outcomes = _score(pool, twice, "0.5", "0.25")
    assert outcomes.rewards == [0.0, -1.0, 0.25]
    assert outcomes.failures == {1}
    assert _score(pool, "0.5").rewards == [0.5]
    before = _pids(pool)
    count = pool._workers[0].count + 1
    unasked = f"os.write(int(sys.argv[1]), bytes([2, {count}]) + bytes(15)) and 1"
    assert _score(pool, unasked).rewards == [0.0]
    for worker in pool._workers:  # none if both answers came at once
        select.select([worker.answers], [], [], 20)
    assert _score(pool, "0.5").rewards == [0.5]
    after = _pids(pool)
    assert after != before
    os.kill(after[0], signal.SIGKILL)
    assert _ends(after[0])
    assert _score(pool, "0.25").rewards == [0.25]
    assert _pids(pool) != after
    pool.close()


def test_workers_see_no_secrets_no_input_and_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("left", encoding="utf-8")
    pool = _pool(tmp_path, config={"words": "words.txt"})  # read by `__init__`, from this folder
    texts = ["'HF_TOKEN' in os.environ", "len(os.listdir('.'))", "task.words == 'left'"]
    assert _score(pool, *texts).rewards == [0.0, 0.0, 1.0]
    pool.close()
    # A class that asks a server needs its key.
    pool = _pool(tmp_path, fence=False)
    text = "__import__('subprocess').run(['touch', 'made']).returncode"
    assert _score(pool, texts[0], text).rewards == [1.0, 0.0]
    assert Path("made").exists()
    pool.close()


def test_data_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    pool = _pool(tmp_path)
    with pytest.raises(UserError, match=r"`Problem\.data` must be something that can be"):
        pool.score([Problem("", data=lambda: 0)], ["1"])
    assert _score(pool, "0.5").rewards == [0.5]
    pool.close()


def test_large_data_is_sent_in_time_that_grows_with_it(tmp_path: Path) -> None:
    """The rest of a message was copied at each write of a pipe's size: 17 s for this."""
    pool = _pool(tmp_path)
    problem = Problem("", data=b"0" * 2**19)
    begin = time.monotonic()
    outcomes = pool.score([problem] * 128, ["1"] * 128)
    assert outcomes.rewards == [1.0] * 128
    assert time.monotonic() - begin < 8
    pool.close()


def test_the_memory_of_a_worker_is_bounded(tmp_path: Path) -> None:
    pool = _pool(tmp_path, limits={"memory_gib": 0.5})
    outcomes = _score(pool, "len(bytes(2**28)) / 2**28", "len(bytes(2**29)) / 2**29")
    assert outcomes.rewards == [1.0, -1.0]
    pool.close()


def test_workers_are_started_when_there_is_work_for_them(tmp_path: Path) -> None:
    pool = _pool(tmp_path, workers=3)
    assert _pids(pool) == []
    assert _score(pool).rewards == []
    assert _pids(pool) == []
    _score(pool, "0")
    first = _pids(pool)
    assert len(first) == 1
    _score(pool, *["0"] * 100)
    assert len(_pids(pool)) == 3
    assert _pids(pool)[:1] == first
    pool.close()
    assert _pids(pool) == []


def test_an_interrupt_ends_the_workers_and_the_next_batch_starts_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = _pool(tmp_path)
    scoring.start()
    (pid,) = _pids(scoring)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _score(scoring, "time.sleep(9)")
    assert _ends(pid)
    assert _score(scoring, "0.5").rewards == [0.5]
    scoring.close()


def test_workers_end_with_a_pool_that_is_forgotten(tmp_path: Path) -> None:
    scoring = _pool(tmp_path)
    scoring.start()
    (pid,) = _pids(scoring)
    os.kill(pid, signal.SIGINT)  # Ctrl-C is not theirs
    assert _score(scoring, "0.5").rewards == [0.5]
    assert _pids(scoring) == [pid]
    del scoring
    assert _ends(pid)


@pytest.mark.parametrize("text", ["0", "9**9**9**9"], ids=["idle", "hanging"])
def test_workers_die_with_the_trainer(tmp_path: Path, text: str) -> None:
    (tmp_path / "task.py").write_text(EVALUATING_TASK, encoding="utf-8")
    program = f"""
import sys
from fastrl.config.environment import PythonEnvironmentConfig
from fastrl.environments import Problem
from fastrl.environments.pool import ScoringPool
pool = ScoringPool(PythonEnvironmentConfig(path="task.py:Task"), 0)
pool.set_probe(Problem(""))
pool.start()
print(pool._workers[0]._process.pid, flush=True)
pool.score([Problem("")], [{text!r}])
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(0.5)
        assert Path(f"/proc/{pid}").exists()
        process.kill()
    assert _ends(pid)


def test_what_no_worker_can_score_ends_the_run(tmp_path: Path) -> None:
    task = EVALUATING_TASK.replace(
        "return -1.0 if", "problem.data and os._exit(0)\n        return -1.0 if"
    )
    pool = _pool(tmp_path, task)
    with pytest.raises(UserError, match=r"3 workers were lost at it; are `environment\.limits` to"):
        pool.score([Problem("", data=True)], ["0.5"])
    assert _pids(pool) == []


SUMS = """
import sys
from fastrl import Problem

class Task:
    def __init__(self, seed):
        pass

    def problems(self, split):
        for a in "1234":
            yield Problem(a, a, data=a)

    def score(self, problem, answer):
        return 0.0 if answer is None else 1.0
"""

NO_WORKER = "import sys; len(sys.argv) == 3 and __import__('os')._exit(7)"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0.0 if", "None if", "TypeError: `score` must return a number, got None, for an answer"),
        ("0.0 if", "'1' if", "TypeError: `score` must return a number, got '1', for an answer"),
        ("0.0 if", "1e999 if", "ValueError: `score` must return a finite number, got inf"),
        ("0.0 if", "len(answer) if", "task.py:Task: `score` raised TypeError: object of type"),
        ("else 1.0", "else 1 / 0", "ZeroDivisionError: division by zero, for an answer of '1'"),
        ("data=a", "data=lambda: 0", "task.py:Task: `Problem.data` must be something that can be"),
        ("pass", "len(sys.argv) == 3 and 1 / 0", "task.py:Task: `__init__` raised ZeroDivision"),
        ("import sys", NO_WORKER, "a scoring worker cannot be started: it ended with exit code 7"),
    ],
)
def test_an_environment_that_cannot_score_is_told_before_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["fastrl"])  # a worker has two arguments
    assert old in SUMS
    (tmp_path / "task.py").write_text(SUMS.replace(old, new), encoding="utf-8")
    environment = {"type": "python", "path": f"{tmp_path / 'task.py'}:Task", "heldout_prompts": 1}
    config = write_tiny(tmp_path, {"environment": environment})
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("answer", ["os._exit(0)", "3"])
def test_processes_score_a_share_each_and_all_get_the_same(tmp_path: Path, answer: str) -> None:
    """Process 1's share has what its worker dies of."""
    _pool(tmp_path)
    values = {"path": f"{tmp_path / 'task.py'}:Task", "heldout_prompts": 1, "workers": 1}
    task = EVALUATING_TASK.replace("Problem(split)", "Problem(str(len(split)))")
    (tmp_path / "task.py").write_text(task, encoding="utf-8")
    config = parse_config(PythonEnvironmentConfig, values)
    shares: dict[int, Any] = {}

    @dataclass
    class Recording:
        rank: int
        size: int = 2

        def gather(self, value: Any) -> list[Any]:
            if isinstance(value, str):  # the digest of the problems
                return [value] * self.size
            shares[self.rank] = value
            if len(shares) < self.size:
                raise InterruptedError("the other has not scored yet")
            return [shares[0], shares[1]]

    answers = ["0", "1", "2", answer, "4", None, "6"]
    found = []
    for rank in (0, 1, 0):
        environment = RunEnvironment(config, 0, Recording(rank))  # type: ignore[arg-type]
        with suppress(InterruptedError):
            found.append(environment.score([Problem("")] * len(answers), answers))
        environment.close()
    assert len(found) == 2
    assert found[0] == found[1]
    died = answer == "os._exit(0)"
    assert found[0].rewards == [0, 1, 2, -1 if died else 3, 4, -1, 6]
    assert found[0].metrics["score_failures"] == died
