"""What can be seen in the kernels' source: fault R1, and 64-bit addresses (fault H1)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastrl

FILES = sorted((Path(fastrl.__file__).parent / "kernels").glob("*.py"))
BUILTINS = {"range", "min", "max", "float", "int"}


def jit_functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                target = decorator.func if isinstance(decorator, ast.Call) else decorator
                if ast.unparse(target) == "triton.jit":
                    yield node


def names_of(path: Path) -> tuple[set[str], set[str]]:
    """Names of module constants that are `tl.constexpr`, and of jitted functions."""
    constants = {
        target.id
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("tl.constexpr")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return constants, {function.name for function in jit_functions(path)}


ALLOWED = set().union(*(part for path in FILES for part in names_of(path)))
KERNELS = [(path, function) for path in FILES for function in jit_functions(path)]


def test_there_are_kernels() -> None:
    assert len(KERNELS) > 8


@pytest.mark.parametrize(
    ("path", "function"), KERNELS, ids=lambda value: getattr(value, "name", "")
)
def test_r1_globals_are_constexpr_or_jitted(path: Path, function: ast.FunctionDef) -> None:
    nodes = list(ast.walk(function))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local = {argument.arg for argument in function.args.args} | stored
    body = [n for statement in function.body for n in ast.walk(statement)]
    loaded = {n.id for n in body if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    unknown = loaded - local - BUILTINS - {"tl"} - ALLOWED
    assert not unknown, f"{path.name}: {function.name} reads {unknown}"


@pytest.mark.parametrize(
    ("path", "function"), KERNELS, ids=lambda value: getattr(value, "name", "")
)
def test_h1_offsets_are_64_bit(path: Path, function: ast.FunctionDef) -> None:
    """Whatever is multiplied by a stride or row count was made int64 on the way."""
    wide = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and "int64" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    # Products of wide numbers are wide.
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            is_load = "tl.load(rows" in ast.unparse(node.value)
            if (isinstance(node.value, ast.Name) and names & wide) or is_load:
                wide.add(node.targets[0].id)
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            text = ast.unparse(node)
            operands = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if any(name.endswith("_stride") or name == "num_rows" for name in operands):
                is_count = "tiles_r" in text or "cdiv" in text
                assert is_count or "int64" in text or operands & wide, f"{path.name}: {text}"
