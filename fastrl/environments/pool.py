"""Worker processes that score completions, so that the trainer evaluates no text of a model.

A worker that takes too long, dies or breaks the protocol is killed and replaced. The completion
it was at is scored as no answer, and the rest of its work goes to other workers.
"""

from __future__ import annotations

import math
import pickle
import selectors
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastrl.config.base import UserError
from fastrl.config.environment import AnyEnvironmentConfig, PythonEnvironmentConfig
from fastrl.environments.protocol import Problem
from fastrl.environments.worker import ERROR, FAILED, READY, Start
from fastrl.environments.worker_process import WorkerProcess

_START_SECONDS = 300.0
"""Longest start of a worker, imports included."""

_MAX_CHUNK = 128
"""Most completions in a message to a worker."""

_MAX_LOSSES = 3
"""Workers lost at scoring no answer to the same problem, at which the run ends."""


@dataclass
class Outcomes:
    """The results of scoring a batch of completions.

    Attributes:
        rewards: of the completions, in order.
        errors: indices of those for which the environment raised.
        timeouts: indices of those that took longer than allowed.
        failures: indices of those at which the worker died or broke the protocol.
    """

    rewards: list[float]
    errors: set[int] = field(default_factory=set)
    timeouts: set[int] = field(default_factory=set)
    failures: set[int] = field(default_factory=set)


class ScoringPool:
    """Worker processes, each with an environment of its own, started on demand.

    They end with the pool and with the process that made it.

    Args:
        config: of the environment.
        seed: of the run.
    """

    def __init__(self, config: AnyEnvironmentConfig, seed: int) -> None:
        self._config = config
        self._start = pickle.dumps(Start(config, seed))
        self._probe: bytes | None = None
        self._workers: list[WorkerProcess] = []
        weakref.finalize(self, _end, self._workers)

    def launch(self) -> None:
        """Starts a worker without waiting for it."""
        worker = WorkerProcess(self._start, has_fence=self._config.has_fence)
        worker.deadline = time.monotonic() + _START_SECONDS
        self._workers.append(worker)
        if self._probe is not None:
            worker.send(self._probe)

    def set_probe(self, probe: Problem) -> None:
        """Sets the problem that each worker scores first; to be called before any is ready.

        So an environment that cannot score is reported before there are completions.

        Raises:
            UserError: the problem is not picklable.
        """
        is_own = isinstance(self._config, PythonEnvironmentConfig) and probe.answer is not None
        answers = (None, probe.answer) if is_own else (None,)
        self._probe = self._pickled([(probe, answer) for answer in answers])
        for worker in self._workers:
            # It may have waited for the problems to be drawn, which does not count.
            worker.deadline = time.monotonic() + _START_SECONDS
            worker.send(self._probe)

    def start(self) -> None:
        """Waits until a worker is ready, starting one if there is none.

        Raises:
            UserError: the worker cannot start, or fails at the probe.
        """
        if not self._workers:
            self.launch()
        if not any(worker.is_ready for worker in self._workers):
            self.score([], [], start=True)

    def close(self) -> None:
        """Ends the workers."""
        _end(self._workers)

    def score(
        self, problems: Sequence[Problem], answers: Sequence[str | None], *, start: bool = False
    ) -> Outcomes:
        """The rewards of answers, one a problem; None stands for a completion that did not end.

        Args:
            problems: of the environment.
            answers: of the model, one a problem.
            start: whether to wait until a worker is ready.

        Raises:
            UserError: a worker cannot be started, or the environment cannot score None.
        """
        batch = _Batch(problems, answers, self._config)
        try:
            self._hand_out(batch)
            while batch.chunks or any(worker.numbers for worker in self._workers) or start:
                _wait(self._workers)
                for worker in list(self._workers):
                    self._collect(worker, batch)
                self._hand_out(batch)
                start = start and not any(worker.is_ready for worker in self._workers)
        except BaseException:
            self.close()  # workers may be amid an item
            raise
        return batch.outcomes

    def _hand_out(self, batch: _Batch) -> None:
        """Sends chunks to idle workers, and starts workers for the chunks that are left."""
        for worker in list(self._workers):
            if not batch.chunks or worker.deadline is not None:
                continue
            if worker.read() or worker.has_ended:  # it answered unasked, or died
                self._remove(worker)
                continue
            worker.numbers.extend(batch.chunks.popleft())
            worker.send(self._pickled([batch.item(number) for number in worker.numbers]))
            worker.deadline = time.monotonic() + self._config.limits.seconds
        num_starting = sum(not worker.is_ready for worker in self._workers)
        while num_starting < len(batch.chunks) and len(self._workers) < self._config.workers:
            self.launch()
            num_starting += 1

    def _collect(self, worker: WorkerProcess, batch: _Batch) -> None:
        """Takes the answers of a worker; one that is late, dead or out of step is removed."""
        if worker.deadline is None:
            return
        frames = worker.read()
        for kind, count, value in frames:
            if not worker.is_ready:
                if kind != READY:
                    text = worker.text if kind == FAILED else "it answers something else"
                    raise UserError(f"`environment`: a scoring worker cannot be started: {text}")
                worker.is_ready = True
            elif worker.expects(kind, count, value):
                worker.count = count
                batch.note(worker.numbers.popleft(), value, is_error=kind == ERROR)
            else:
                self._lose(worker, batch, batch.outcomes.failures)
                return
        is_late = not frames and time.monotonic() > worker.deadline
        if not worker.numbers and worker.is_ready:
            worker.deadline = None
        elif worker.has_ended or is_late:
            outcomes = batch.outcomes
            self._lose(worker, batch, outcomes.timeouts if is_late else outcomes.failures)
        elif frames:
            worker.deadline = time.monotonic() + self._config.limits.seconds

    def _pickled(self, items: Sequence[tuple[Problem, str | None]]) -> bytes:
        try:
            return pickle.dumps(items)
        except Exception as error:
            raise UserError(
                f"{self._config.label}: `Problem.data` must be something that can be pickled, got "
                f"{items[0][0].data!r} ({error})"
            ) from error

    def _lose(self, worker: WorkerProcess, batch: _Batch, numbers: set[int]) -> None:
        self._remove(worker)
        if not worker.is_ready:
            raise UserError(
                f"`environment`: a scoring worker cannot be started: it ended with exit code "
                f"{worker.exit_code}, or was not ready after {_START_SECONDS:g} s"
            )
        batch.lose(list(worker.numbers), numbers)

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.end()


class _Batch:
    """A batch in progress: the chunks that are left, and the results so far."""

    def __init__(
        self,
        problems: Sequence[Problem],
        answers: Sequence[str | None],
        config: AnyEnvironmentConfig,
    ) -> None:
        self._problems = problems
        self._answers = list(answers)
        self._losses = [0] * len(answers)
        self._config = config
        self.outcomes = Outcomes([math.nan] * len(answers))
        size = min(_MAX_CHUNK, math.ceil(len(answers) / config.workers)) or 1
        numbers = range(len(answers))
        self.chunks = deque([*numbers[i : i + size]] for i in range(0, len(answers), size))

    def item(self, number: int) -> tuple[Problem, str | None]:
        return self._problems[number], self._answers[number]

    def note(self, number: int, reward: float, *, is_error: bool) -> None:
        self.outcomes.rewards[number] = reward
        if is_error:
            self.outcomes.errors.add(number)

    def lose(self, numbers: list[int], kind: set[int]) -> None:
        """Takes back the items of a lost worker; the first is scored again, alone, as no answer."""
        if not numbers:
            return  # it broke the protocol after its last item
        first, *rest = numbers
        if rest:
            self.chunks.appendleft(rest)
        self.chunks.appendleft([first])
        if self._answers[first] is not None:
            self._answers[first] = None
            kind.add(first)
            return
        self._losses[first] += 1
        if self._losses[first] == _MAX_LOSSES:
            raise UserError(
                f"{self._config.label}: `score` must give the reward of no answer (None), but "
                f"{_MAX_LOSSES} workers were lost at it; are `environment.limits` too low? They are"
                f" {self._config.limits.seconds:g} s and {self._config.limits.memory_gib:g} GiB"
            )


def _wait(workers: Sequence[WorkerProcess]) -> None:
    """Waits until a worker can be read from or written to, or the earliest deadline is past."""
    busy = [worker for worker in workers if worker.deadline is not None]
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            selector.register(worker.answers, selectors.EVENT_READ)
            if worker.unsent:
                selector.register(worker.messages, selectors.EVENT_WRITE)
        earliest = min(worker.deadline for worker in busy if worker.deadline is not None)
        selector.select(max(0.0, earliest - time.monotonic()))
    for worker in busy:
        worker.send_more()


def _end(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.end()
    workers.clear()
