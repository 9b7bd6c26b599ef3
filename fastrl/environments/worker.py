"""The worker process: an environment of its own, which scores what the trainer sends.

The trainer sends pickles. The worker answers with frames of fixed size, which hold numbers,
and never with a pickle, as text that is evaluated in it could forge one.
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
from fastrl.environments.fence import end_with_parent, leave_network, limit_memory, raise_fence
from fastrl.environments.protocol import Environment
from fastrl.environments.scoring import build_environment, finite_score
from fastrl.environments.user_class import described

FRAME = struct.Struct("<BQd")
"""An answer: its kind, how many answers came before it, and its value.

The count tells the trainer of an answer too many, which would shift those that follow."""

READY, FAILED, SCORE, ERROR = range(4)
"""Kinds of answers: ready to score; not so, with the length of a text that follows; the reward of
the next item; the reward of no answer, as the next item could not be scored."""

MAX_TEXT = 2000
"""Most bytes of the text after FAILED."""


@dataclass(frozen=True)
class Start:
    """The first message; the second one are (problem, answer) pairs that must give no error.

    Attributes:
        config: of the environment.
        seed: of the run.
    """

    config: AnyEnvironmentConfig
    seed: int


def main(arguments: Sequence[str]) -> None:
    """Scores until the input ends.

    Args:
        arguments: file descriptor for the answers, and process id of the trainer.
    """
    answers, parent = map(int, arguments)
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The messages' own descriptor, so that nothing that is scored reads them from standard input.
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
        except EOFError:  # the trainer needs no more
            return
        for problem, answer in items:
            count += 1
            try:
                frame = FRAME.pack(SCORE, count, finite_score(environment, problem, answer))
            except BaseException:  # also SystemExit: it may be the text that is evaluated
                frame = FRAME.pack(ERROR, count, finite_score(environment, problem, None))
            os.write(answers, frame)


def _begin(messages: BinaryIO) -> Environment:
    start: Start = pickle.load(messages)
    config = start.config
    limit_memory(config.limits.memory_gib)
    if config.has_fence:
        leave_network()
    environment = build_environment(config, start.seed)
    probe = pickle.load(messages)  # after its classes, which may be of the environment's file
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
