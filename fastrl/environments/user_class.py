"""The environment that a user wrote: a class from a file or a package that the config names."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fastrl.config.base import UserError
from fastrl.config.environment import PythonEnvironmentConfig
from fastrl.config.import_path import import_class
from fastrl.environments.protocol import Environment, Problem, Split


class UserEnvironment:
    """An instance of the user's class, whose exceptions are reported with path and line.

    Args:
        config: names the class and its options.
        seed: of the run.

    Raises:
        UserError: no such file, package or class; a class without the methods of `Environment`; or
            an exception in its `__init__`.
    """

    def __init__(self, config: PythonEnvironmentConfig, seed: int) -> None:
        self._config = config
        made_by = _find_class(config.path)
        self._file = sys.modules[made_by.__module__].__file__
        with self._named("`__init__`"):
            self._made: Environment = made_by(seed=seed, **config.config)
        self._check_method("problems", "split")
        self._check_method("score", "problem", "answer")

    def problems(self, split: Split) -> Iterator[Problem]:
        """The problems that the class yields.

        Raises:
            UserError: its code raised, or yielded something other than a `Problem`.
        """
        with self._named("`problems`"):
            for problem in self._made.problems(split):
                if not isinstance(problem, Problem):
                    raise UserError(
                        f"{self._config.path}: `problems` must yield `fastrl.Problem`, got "
                        f"{problem!r}"
                    )
                yield problem

    def score(self, problem: Problem, answer: str | None) -> float:
        """The class's score; exceptions pass through."""
        return self._made.score(problem, answer)

    def _check_method(self, name: str, *arguments: str) -> None:
        method = getattr(self._made, name, None)
        wanted = f"`{name}({', '.join(('self', *arguments))})`"
        if not callable(method):
            raise UserError(f"{self._config.path}: the class must have a method {wanted}, has none")
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise UserError(
                f"{self._config.path}: the class must have a method {wanted}, got "
                f"`{name}{inspect.signature(method)}` ({error})"
            ) from error

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            place = _line_in(error, self._file)
            raise UserError(f"{self._config.path}: {what} raised {described(error)}{place}") from (
                error
            )


def described(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _find_class(path: str) -> type:
    try:
        return import_class(path)
    except UserError as error:
        raise UserError(f"`environment.path` {error}") from error


def _line_in(error: BaseException, path: str | None) -> str:
    """The last line of a file in an exception's traceback, as the end of a message."""
    if path is None:
        return ""
    if isinstance(error, SyntaxError) and error.filename == path:
        return ""  # the message has it already
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    return f" (line {lines[-1]})" if lines else ""
