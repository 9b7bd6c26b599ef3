"""Imports point one way, configs need no torch, and all works without Triton and CUDA.

Of the tests: no module of tests is imported by another.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fastrl"
TESTS = Path(__file__).parent

_FOUNDATION = {"config", "parallel", "kernels"}
_MODELS = _FOUNDATION | {"functional", "layers", "data"}
_TRAINING = _MODELS | {"models"}

# Each part of the package, and the parts that it may import besides itself.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "parallel": set(),
    "kernels": set(),
    "environments": {"config"},
    "functional": _FOUNDATION,
    "layers": _FOUNDATION | {"functional"},
    "data": _FOUNDATION | {"functional"},
    "models": _MODELS,
    # A config that asks for a model of transformers has the trainer load it.
    "training": _TRAINING | {"environments", "integrations"},
    "estimate": _FOUNDATION | {"functional", "layers", "models"},
    "commands": _TRAINING | {"environments", "estimate", "training"},
    "cli": {"config", "commands", "training"},  # of training, the exit code of Ctrl-C
    "integrations": _TRAINING | {"training"},
    "__main__": {"cli", "training"},  # of which the handler of Ctrl-C, before any torch
    "__init__": _TRAINING | {"environments"},
}

# An import of Triton fails as where it is not installed, and no GPU is seen.
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
torch.cuda.is_available = lambda: False
"""


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    name = ".".join(("fastrl", *path.relative_to(PACKAGE).with_suffix("").parts))
    return name.removesuffix(".__init__") if name != "fastrl.__init__" else name


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def _imports(path: Path) -> Iterator[str]:
    """Yields all that a file names in an import, also inside functions and for types."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"relative import in {path}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_imports_point_one_way(path: Path) -> None:
    part = _part(_module(path))
    for imported in _imports(path):
        if imported.split(".")[0] == "fastrl":
            assert _part(imported) in ALLOWED[part] | {part}, f"{part} must not import {imported}"


def test_every_part_is_known() -> None:
    assert {_part(_module(path)) for path in _sources()} <= set(ALLOWED)


# Trainers that one installs as they say, and then adds fastrl.
OTHER_TRAINERS = {"megatron", "torchtitan", "verl"}

# Packages that are imported under another name.
MODULES = {"pyyaml": "yaml"}


def _modules(requirements: list[str]) -> set[str]:
    """What the packages of a list of requirements are imported as."""
    names = (re.split(r"[\s\[<>=;]", requirement)[0].lower() for requirement in requirements)
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def test_b8_extras_are_what_the_package_imports() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    extras = project["optional-dependencies"]
    adapters, others = set[str](), set[str]()
    for path in _sources():
        found = adapters if _part(_module(path)) == "integrations" else others
        found |= {name.split(".")[0] for name in _imports(path)}
    ours = {"fastrl", *sys.stdlib_module_names}
    always = _modules(project["dependencies"])
    assert adapters - ours - always - OTHER_TRAINERS == _modules(extras["integrations"])
    # TensorBoard is imported by torch; Triton and pydantic's core come with torch and pydantic.
    brought = {"triton", "pydantic_core"}
    optional = _modules(extras["examples"]) | _modules(extras["servers"])
    assert others - ours - brought | {"tensorboard"} == always | optional


def _is_of_a_test_module(imported: str) -> bool:
    first, *names = imported.split(".")
    return first == "tests" and any(name.startswith(("test_", "conftest")) for name in names)


def test_what_tests_share_is_in_helpers() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        for imported in _imports(path):
            assert not _is_of_a_test_module(imported), (
                f"{path.relative_to(TESTS)} must not import {imported}: "
                "what several test modules need belongs in tests/helpers/"
            )


def _defines(module: str) -> bool:
    return module.startswith("fastrl.functional.reference")


def test_the_definition_imports_torch_only_and_nothing_ships_on_it() -> None:
    for path in _sources():
        imported = list(_imports(path))
        if not _defines(_module(path)):
            assert not any(_defines(name) for name in imported), path
            continue
        others = {name.split(".")[0] for name in imported if not _defines(name)}
        assert others - sys.stdlib_module_names <= {"torch"}, path


@pytest.mark.parametrize(
    "module", ["fastrl.__main__", "fastrl.config", "fastrl.cli", "fastrl.environments.pool"]
)
def test_configs_environments_and_the_command_line_import_without_torch(module: str) -> None:
    done = _run(f"import sys, {module}; print(sorted({{'torch', 'triton'}} & set(sys.modules)))")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_x1_everything_imports_without_triton_and_cuda() -> None:
    program = f"""{WITHOUT_TRITON}
import importlib, pkgutil, fastrl
for module in pkgutil.walk_packages(fastrl.__path__, "fastrl."):
    # Those in `kernels` are Triton code; `kernels` itself says whether they can run.
    if not module.name.startswith(("fastrl.kernels.", "fastrl.integrations.", "fastrl.__main__")):
        importlib.import_module(module.name)
for name in fastrl.__all__:
    getattr(fastrl, name)
assert sys.modules["triton"] is None
"""
    done = _run(program)
    assert done.returncode == 0, done.stderr


def test_x1_help_works_without_triton_and_torch() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, triton=None);"
        "from fastrl.cli import main; main(sys.argv[1:])"
    )
    done = _run(program, "train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: fastrl train")


def test_x1_each_loss_runs_without_triton_and_cuda() -> None:
    program = f"""{WITHOUT_TRITON}
from fastrl import Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
documents = [
    Document(tokens=[1, 2, 3, 4], prompt_length=1, logprobs=[-1.0, -2.0, -0.5], advantage=a)
    for a in (1.0, -0.5)
]
(batch,) = TokenBatch.from_documents(documents).to_kwargs()
for loss in ("cross_entropy", "grpo", "gspo"):
    config = LanguageModelHeadConfig(hidden_size=6, vocab_size=11, losses={{"a": {{"type": loss}}}})
    head = LanguageModelHead(config)
    torch.nn.init.normal_(head.weight)
    hidden = torch.randn(batch.tokens.shape[0], 6, requires_grad=True)
    head(hidden, batch).loss.backward()
    assert hidden.grad.abs().sum() > 0 and head.weight.grad.isfinite().all(), loss
"""
    done = _run(program)
    assert done.returncode == 0, done.stderr


def test_x1_one_step_of_each_phase_runs_without_triton_and_cuda(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        """
environment:
  {type: reasoning_gym, task: chain_sum, train_prompts: 64, heldout_prompts: 4,
   config: {max_terms: 2, max_digits: 1}}
model: {type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
sampler: {max_new_tokens: 4}
logging: {tensorboard: false, report: false}
phases:
  - {type: supervised, steps: 1, documents_per_step: 8, losses: {a: {type: cross_entropy}}}
  - {type: rl, steps: 1, rollouts: {type: sampler, prompts_per_step: 2, group_size: 4},
     losses: {a: {type: grpo}}}
""",
        encoding="utf-8",
    )
    program = f"{WITHOUT_TRITON}\nfrom fastrl.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = _run(program, "train", str(config), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("held-out reward: ")
