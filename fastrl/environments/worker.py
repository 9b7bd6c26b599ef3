"""The worker process: it has an environment of its own and scores what the trainer sends.

The trainer sends pickles. The worker answers in frames of fixed size that hold numbers, never in
pickles, which text that is evaluated in the worker could forge.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from fastrl.config.base import UserError
from fastrl.config.environment import AnyEnvironmentConfig
from fastrl.environments.fence import leave_network, limit_memory, raise_fence
from fastrl.environments.parent import end_with_parent
from fastrl.environments.protocol import Environment
from fastrl.environments.scoring import build_environment, finite_score
from fastrl.environments.user_class import described

FRAME = struct.Struct("<BQd")
"""An answer: its kind, its number counted from 1, and its value.

The number exposes a surplus answer, which would shift those that follow."""

READY, FAILED, SCORE, ERROR = range(4)
"""Kinds of answers: ready to score; failed to start, with the length of a message that follows; the
reward of the next item; the reward of no answer, as scoring the next item raised."""

MAX_TEXT = 2000
"""Most bytes of the message after FAILED."""


@dataclass(frozen=True)
class Start:
    """The first message. The second is a list of (problem, answer) pairs that must be scorable.

    Attributes:
        config: of the environment.
        seed: of the run.
    """

    config: AnyEnvironmentConfig
    seed: int


def main(arguments: Sequence[str]) -> None:
    """Scores until the input ends.

    Args:
        arguments: file descriptor for answers, and process id of the trainer.
    """
    answers, parent = map(int, arguments)
    end_with_parent(parent)
    # Schedulers send these to all processes of a job, and the trainer finishes its step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Messages get a descriptor of their own, so that scored text cannot read them from stdin.
    messages = os.fdopen(os.dup(0), "rb")
    os.dup2(1, 0)  # /dev/null
    try:
        environment = _begin(messages)
    except BaseException as error:
        text = str(error) if isinstance(error, UserError) else described(error)
        told = text.encode("utf-8", "replace")[:MAX_TEXT]
        os.write(answers, FRAME.pack(FAILED, 0, len(told)) + told)
        return
    os.write(answers, FRAME.pack(READY, 0, 0.0))
    count = 0
    while True:
        try:
            items = pickle.load(messages)
        except EOFError:  # the trainer is done
            return
        for problem, answer in items:
            count += 1
            try:
                frame = FRAME.pack(SCORE, count, finite_score(environment, problem, answer))
            except BaseException:  # SystemExit too: the evaluated text may raise it
                frame = FRAME.pack(ERROR, count, finite_score(environment, problem, None))
            os.write(answers, frame)


def _begin(messages: BinaryIO) -> Environment:
    start: Start = pickle.load(messages)
    config = start.config
    limit_memory(config.limits.memory_gib)
    if config.has_fence:
        leave_network()
    environment = build_environment(config, start.seed)
    # After the environment, whose file may define the classes in it.
    probe = pickle.load(messages)
    if config.has_fence:
        raise_fence()
    for problem, answer in probe:
        try:
            finite_score(environment, problem, answer)
        except Exception as error:
            raise UserError(
                f"{config.label}: `score` raised {described(error)}, for an answer of {answer!r}"
            ) from error
    return environment


if __name__ == "__main__":
    main(sys.argv[1:])
