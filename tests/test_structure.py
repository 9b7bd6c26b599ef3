"""Sizes that keep the package readable, and the one room of the head's collectives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fastrl"
HEAD = PACKAGE / "functional" / "head"
LOSSES = PACKAGE / "layers" / "losses"
# The public op spells its options out.
MANY_PARAMETERS = {"linear_logprobs"}
COLLECTIVES = ("all_reduce", "all_gather", "gather_first_dim", "reduce_scatter")


def _functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def _is_jitted(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


FUNCTIONS = [(path, function) for path, function in _functions() if not _is_jitted(function)]


def test_no_function_has_over_ten_parameters() -> None:
    for path, function in FUNCTIONS:
        arguments = function.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names += [name for name in (arguments.vararg, arguments.kwarg) if name is not None]
        counted = [name.arg for name in names if name.arg not in ("self", "cls", "ctx")]
        if function.name not in MANY_PARAMETERS:
            assert len(counted) <= 10, f"{path.relative_to(PACKAGE)}: {function.name} {counted}"


def test_no_function_has_over_sixty_lines() -> None:
    for path, function in FUNCTIONS:
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        if function.name not in MANY_PARAMETERS:
            assert lines <= 60, f"{path.relative_to(PACKAGE)}: {function.name} has {lines} lines"


@pytest.mark.parametrize("path", sorted(HEAD.glob("*.py")), ids=lambda path: path.stem)
def test_a_file_of_the_head_is_short_and_only_one_has_collectives(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 230
    if path.stem == "sharding":
        assert all(name in text for name in ("all_reduce", "gather_first_dim", "reduce_scatter"))
        return
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert not [name for name in names if name.startswith(COLLECTIVES)]


@pytest.mark.parametrize("path", sorted(LOSSES.glob("*.py")), ids=lambda path: path.stem)
def test_a_file_of_the_losses_has_at_most_a_hundred_lines(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= 100
