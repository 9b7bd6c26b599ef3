"""Environments of the user's own: a class that the config names, from a file or a package."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fastrl.config.base import UserError
from fastrl.config.environment import PythonEnvironmentConfig
from fastrl.environments.protocol import Environment, Problem, Split


class UserEnvironment:
    """An object of the user's class. What goes wrong in its code is told with its path and line.

    Args:
        config: names the class and its options.
        seed: of the run.

    Raises:
        UserError: no such file, package or class; a class without the methods of `Environment`; or
            an exception of its code.
    """

    def __init__(self, config: PythonEnvironmentConfig, seed: int) -> None:
        self._config = config
        self._module, made_by = _find_class(config)
        with self._named("`__init__`"):
            self._made: Environment = made_by(seed=seed, **config.config)
        self._check_method("problems", "split")
        self._check_method("score", "problem", "answer")

    def problems(self, split: Split) -> Iterator[Problem]:
        """What the class yields.

        Raises:
            UserError: an exception of its code, or something that is no `Problem`.
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
        """The class's own score, with whatever it raises."""
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
            place = _line_in(error, self._module.__file__)
            raise UserError(f"{self._config.path}: {what} raised {described(error)}{place}") from (
                error
            )


def described(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _find_class(config: PythonEnvironmentConfig) -> tuple[ModuleType, Callable[..., Any]]:
    source, _, name = config.path.rpartition(":")
    try:
        module = _module_of_file(Path(source)) if source.endswith(".py") else _import(source)
    except UserError:
        raise
    except Exception as error:
        place = _line_in(error, str(Path(source)) if source.endswith(".py") else None)
        raise UserError(
            f"`environment.path`: {source} cannot be loaded: {described(error)}{place}"
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = difflib.get_close_matches(name, classes, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise UserError(f"`environment.path`: {source} has no class `{name}`{hint}")
    return module, found


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(
            f"`environment.path`: {path} is not there; paths are relative to the current folder"
        )
    # Not under its own name, which may be that of an installed package; by this one the classes in
    # it are found again when a problem's data is unpickled in a worker.
    name = f"fastrl_environment_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise UserError(
            f"`environment.path`: there is no module `{name}`; install its package, or give a file "
            "as `FILE.py:CLASS`"
        ) from error


def _line_in(error: BaseException, path: str | None) -> str:
    """The last line of a file that an exception went through, as the end of a message."""
    if path is None:
        return ""
    if isinstance(error, SyntaxError) and error.filename == path:
        return ""  # told by the error itself
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    return f" (line {lines[-1]})" if lines else ""
