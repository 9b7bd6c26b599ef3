"""Names, signatures and commands as text: what a program or a shell script that uses fastrl sees.

Module paths of types do not enter, nor do private names: code may move under the names of users.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

import fastrl
from fastrl import cli
from fastrl.config import AnyLossConfig

# Modules that docs and examples import from, beside `fastrl` itself. A module without names here
# says by its `__all__` what is public.
MODULES: dict[str, tuple[str, ...]] = {
    "fastrl": (),
    "fastrl.config": (),
    "fastrl.layers.losses": (),
    "fastrl.data.advantages": (
        "combined_rewards",
        "group_advantages",
        "has_advantage",
        "with_group_advantages",
        "with_kl_in_rewards",
        "without_labels",
        "without_zero_groups",
    ),
    "fastrl.data.packing": ("pack_documents",),
    "fastrl.data.padded": ("documents_from_padded", "padded_from_documents"),
    "fastrl.data.preferences": ("preference_pairs",),
    "fastrl.data.rollouts": ("RolloutFileError", "read_rollouts", "write_rollouts"),
    "fastrl.models.checkpoint": ("load_llama", "load_weights", "read_llama_config", "save_llama"),
    "fastrl.models.parallelize": ("parallelize_llama", "reduce_gradients"),
    "fastrl.parallel": (
        "AXES",
        "ParallelGroups",
        "all_gather",
        "all_reduce_sum",
        "all_reduce_tensors",
        "device_mesh",
        "gather_first_dim",
        "group_rank",
        "group_size",
        "reduce_scatter_first_dim",
        "shard_like",
        "start_reduce_scatter",
        "vocab_shard",
        "whole_tensor",
    ),
    "fastrl.cli": ("main", "INTERRUPTED", "BROKEN_PIPE"),
}

# What the parts of the package ask of one another: what a loss must see at once, and the rows that
# it acts on, by which the head chooses its strategy; which tokens a rank's head holds.
_BETWEEN_PARTS = {
    "gradient_rows",
    "head_splits_tokens",
    "level",
    "rows_with_labels",
    "scope",
    "splits_tokens",
}

# What the arguments of a command are tried with, to see what their types accept.
_PROBES = ("x", "-1", "0", "1", "1.5", "inf")


def public_names() -> dict[str, list[str]]:
    """Each public name with the lines of its signature, fields and methods."""
    names: dict[str, list[str]] = {}
    for module_name, listed in MODULES.items():
        module = import_module(module_name)
        for name in listed or module.__all__:
            names[f"{module_name}.{name}"] = _lines(name, getattr(module, name))
    # Users reach these through a parameter: the one of a head, the other of a loss of their own.
    for owner, parameter in (
        (fastrl.LanguageModelHead.forward, "teacher"),
        (import_module("fastrl.layers.losses").LanguageModelPolicyGradientLoss.surrogate, "terms"),
    ):
        annotation = get_type_hints(owner)[parameter]
        kind = next(iter(get_args(annotation)), annotation)
        names[f"{owner.__qualname__}({parameter})"] = _lines(kind.__name__, kind)
    return names


def _lines(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        return [_bases(value), *_fields(value), *_members(value)]
    if inspect.isfunction(value):
        return [_signature(name, value)]
    if get_args(value):  # a union; what pydantic says beside it is in the schema
        return [f"{name} = {' | '.join(kind.__name__ for kind in members(value))}"]
    return [f"{name} = {value!r}"]


def members(annotation: Any) -> Iterator[Any]:
    """The classes of a union of annotated unions."""
    if inspect.isclass(annotation):
        yield annotation
        return
    of_union = get_args(annotation)
    for part in of_union[:1] if get_origin(annotation) is Annotated else of_union:
        yield from members(part)


def _bases(kind: type) -> str:
    """The ancestors that users can name."""
    public = {name for module in MODULES for name in getattr(import_module(module), "__all__", ())}
    bases = [
        base.__name__
        for base in kind.__mro__[1:]
        if base.__name__ in public or not _is_ours(base) or issubclass(base, Exception)
    ]
    kept = [name for name in bases if name not in ("object", "Generic", "ABC", "BaseException")]
    return f"class {kind.__name__}({', '.join(kept)})"


def _fields(kind: type) -> Iterator[str]:
    if issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            default = info.default
            if isinstance(default, BaseModel):
                default = default.model_dump()
            shown = "computed" if info.default_factory is not None else repr(default)
            yield name if info.is_required() else f"{name} = {shown}"
    elif dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            if field.default_factory is not dataclasses.MISSING:
                default = f" = {field.default_factory()!r}"
            star = "*, " if field.kw_only else ""
            yield f"{star}{field.name}: {_annotation(field.type)}{default}"


def _members(kind: type) -> list[str]:
    """Methods, properties and constants of a class and of its ancestors in fastrl."""
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if _is_ours(base):
            members |= vars(base)
    has_fields = dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel)
    called = {"__call__", "__len__"} if has_fields else {"__call__", "__len__", "__init__"}
    fields = set(getattr(kind, "__dataclass_fields__", ()))
    lines = []
    for name, value in sorted(members.items()):
        if (name.startswith("_") and name not in called) or name in fields:
            continue
        if name.startswith("model_") and issubclass(kind, BaseModel):
            continue
        if name in _BETWEEN_PARTS:
            continue
        if isinstance(value, property):
            result = inspect.signature(value.fget or len).return_annotation
            lines.append(f".{name} -> {_annotation(result)}")
        elif isinstance(value, classmethod | staticmethod):
            lines.append(f"{type(value).__name__} {_signature(name, value.__func__)}")
        elif inspect.isfunction(value):
            lines.append(_signature(f".{name}", value))
        else:
            lines.append(f".{name} = {value.__name__ if inspect.isclass(value) else repr(value)}")
    return lines


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "fastrl"


class _Text(str):
    """A type in a signature, shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_annotation(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    result = _annotation(signature.return_annotation)
    return f"{name}{signature.replace(parameters=parameters, return_annotation=result)}"


def _annotation(value: Any) -> Any:
    """A type as it is written, without the modules that its names come from."""
    if value is inspect.Signature.empty:
        return value
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    text = text.replace(repr(AnyLossConfig), "AnyLossConfig")
    return _Text(re.sub(r"~|\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", text.replace('"', "'")))


def command_line() -> dict[str, list[str]]:
    """Each command with its arguments, what they accept, and the exit codes."""

    class Captured(Exception):
        pass

    def capture(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Captured(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", capture)
        with pytest.raises(Captured) as caught:
            cli.main([])
    return dict(_commands("fastrl", caught.value.args[0]))


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    lines, nested = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            nested = list(action.choices.items())
            lines.append(f"commands {sorted(action.choices)}, required={action.required}")
            continue
        facts = {
            "dest": action.dest,
            "metavar": action.metavar,
            "nargs": action.nargs,
            "required": action.required,
            "default": action.default,
            "choices": action.choices,
            "accepts": _accepted(action.type),
        }
        given = [f"{key}={value!r}" for key, value in facts.items() if value is not None]
        lines.append(" ".join([*action.option_strings, *given]))
    yield name, lines
    for command, subparser in nested:
        yield from _commands(f"{name} {command}", subparser)


def _accepted(kind: Any) -> dict[str, str] | None:
    if kind is None:
        return None
    accepted = {}
    for text in _PROBES:
        try:
            accepted[text] = repr(kind(text)).replace(type(Path()).__name__, "Path")
        except (ValueError, argparse.ArgumentTypeError):
            accepted[text] = "refused"
    return accepted


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Exit code and output of commands that succeed, fail and are used wrongly."""
    path = folder / "run.yaml"
    environment = {"type": "reasoning_gym", "task": "chain_sum"}
    phases = [{"type": "rl", "steps": 1, "losses": {"policy": {"type": "grpo"}}}]
    path.write_text(json.dumps({"environment": environment, "phases": phases}), encoding="utf-8")
    check = ["config", "check"]
    with pytest.raises(SystemExit) as caught, redirect_stderr(StringIO()):
        cli.main(["config"])
    return {
        "done": _outcome([*check, str(path)], folder),
        "a wrong key": _outcome([*check, str(path), "sed=1"], folder),
        "no such file": _outcome([*check, str(folder / "none.yaml")], folder),
        # What argparse says about it is Python's.
        "wrong usage": {"code": caught.value.code},
    }


def _outcome(arguments: list[str], folder: Path) -> dict[str, Any]:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(arguments)
    lines = [text.getvalue().replace(str(folder), "FOLDER").splitlines() for text in (out, err)]
    return {"code": code, "out": lines[0], "err": lines[1]}
