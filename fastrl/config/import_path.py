"""Classes that a config names: `my_package.module:Class`, or `path/to/file.py:Class`.

Naming a class runs the code of its module with all rights of the user: the author of a config is
trusted. Nothing but a config names code, no rollout file and no weights.
"""

import importlib
import importlib.util
import sys
import traceback
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from fastrl.config.base import UserError


def is_import_path(value: object) -> bool:
    """Whether a value is meant as the import path of a class."""
    return isinstance(value, str) and ":" in value


def import_class(path: str) -> type:
    """The class at an import path; its module is executed at the first call.

    Args:
        path: `my_package.module:Class`, or `path/to/file.py:Class` relative to the current folder.

    Raises:
        UserError: no such module, file or class, or an exception of the module; the message goes on
            after the key that holds the path.
    """
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise UserError(
            "must name a class as `my_package.module:Class` or `path/to/file.py:Class`, got"
            f" `{path}`"
        )
    try:
        module = _file_module(Path(source)) if source.endswith(".py") else _module(source, name)
    except UserError:
        raise
    except Exception as error:  # whatever the user's module raises
        raise UserError(f"must name a class, got `{path}`: {_described(error)}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = get_close_matches(name, classes, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise UserError(f"must name a class, but `{source}` has no class `{name}`{hint}")
    return found


def _module(source: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise UserError(
            f"must name a class, but there is no module `{source}`; install its package, or name"
            f" its file as `path/to/file.py:{name}`"
        ) from error


def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(
            f"must name a class, but there is no file `{path}`; paths are relative to the current"
            " folder"
        )
    # Not by its stem alone, which may be the name of an installed package; and without a dot, as
    # pickle imports the module of a class by this name.
    key = f"{path.stem}_{sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # where the annotations of its classes are looked up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


def _described(error: Exception) -> str:
    """An exception with the line that raised it, as one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        return text  # which names file and line
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}, line {frame.lineno})"
