"""What the documents promise: two set-up commands, links that lead somewhere, code that runs."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastrl import Document, cli
from fastrl.config import ConfigError, RunConfig, load_config, parse_config
from fastrl.config.yaml_text import parse_yaml

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted((ROOT / "docs").glob("**/*.md")),
]


def _blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found


def test_the_readme_has_exactly_two_set_up_commands() -> None:
    commands = [block for block in _blocks(ROOT / "README.md", "bash") if "pip install" in block]
    assert [command.count("\n") for command in commands] == [1, 1]
    assert [re.findall(r"\[(\w+)\]' && (\w+)", command) for command in commands] == [
        [("examples", "fastrl")],
        [("test", "pytest")],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_the_package_exist(page: Path) -> None:
    for path in re.findall(r"`(fastrl/[\w./]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path


def _anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([\w./]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    for file, anchor in links:
        assert anchor in _anchors(page.parent / file if file else page), (file, anchor)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_those_of_the_command_line(page: Path) -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in lines:
        command = re.match(r"(?:\$ )?fastrl ((?:[a-z]+ ).*)", line.split("&& ")[-1])
        if command and "[" not in line:
            arguments = shlex.split(command[1], comments=True)
            parsed, rest = cli._parser().parse_known_args(arguments)
            assert not rest or hasattr(parsed, "overrides"), line


def test_the_index_of_the_docs_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md")}
    assert pages - {"README.md"} == set(re.findall(r"\]\(([^).]+\.md)\)", index))


def test_the_faults_are_those_of_the_tests_names() -> None:
    of_tests: dict[str, set[str]] = {}
    for path in (ROOT / "tests").glob("**/test_*.py"):
        text = path.read_text(encoding="utf-8")
        for code in re.findall(r"^def test_((?:[a-z]|rl)\d+)_", text, re.MULTILINE):
            file = path.relative_to(ROOT / "tests").as_posix()
            of_tests.setdefault(code.upper(), set()).add(file)
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:[A-Z]|RL)\d+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert {code: set(re.findall(r"`([^`]+)`", files)) for code, files in rows} == of_tests


def test_the_citation_and_the_oldest_torch_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = parse_yaml((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert [citation[name] for name in ("title", "version", "license")] == [
        project[name] for name in ("name", "version", "license")
    ]
    (oldest,) = re.findall(r"^torch>=([\d.]+)$", "\n".join(project["dependencies"]), re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "ci.yaml").read_text(encoding="utf-8")
    assert f"'torch=={oldest}.*'" in workflow
    assert f"startswith('{oldest}.')" in workflow


def test_all_tests_are_run_by_one_command() -> None:
    (command,) = (line for line in _blocks(ROOT / "README.md", "bash") if "[test]" in line)
    _, _, tests = command.strip().partition(" && ")
    assert tests.startswith("pytest ")
    workflow = (ROOT / ".github" / "workflows" / "ci.yaml").read_text(encoding="utf-8")
    assert f"- run: {tests}\n" in workflow
    assert f"`{tests}`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


# Their examples are whole programs; those of other pages go on from what the text says.
PROGRAMS = [
    "README.md",
    *(f"docs/{name}.md" for name in ("config", "data", "determinism", "heads")),
]


@pytest.mark.parametrize("page", PROGRAMS)
def test_python_examples_run(page: str) -> None:
    scope: dict[str, object] = {}
    blocks = [_own_loop()] if page == "README.md" else _blocks(ROOT / page, "python")
    for block in blocks:
        exec(compile(block, page, "exec"), scope)


def _own_loop() -> str:
    """The block of the README that is a whole program."""
    (block,) = (text for text in _blocks(ROOT / "README.md", "python") if "import torch\n" in text)
    return block


def test_the_readme_attaches_the_head_to_a_model_of_transformers() -> None:
    (block,) = (text for text in _blocks(ROOT / "README.md", "python") if "attach_head(" in text)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    scope: dict[str, Any] = {
        "model": LlamaForCausalLM(config),
        "documents": [
            Document(tokens=[5, 3, 8, 1], prompt_length=1, logprobs=[-3.0] * 3, advantage=0.7),
            Document(tokens=[5, 3, 7], prompt_length=1, logprobs=[-3.0] * 2, advantage=-0.7),
        ],
    }
    exec(compile(block.replace('"cuda"', '"cpu"'), "README.md", "exec"), scope)
    assert torch.isfinite(scope["metrics"]["loss"])
    assert scope["model"].lm_head.weight.grad.abs().sum() > 0


def test_the_loop_of_the_readme_does_not_depend_on_its_micro_batches() -> None:
    block = _own_loop()
    results = []
    for max_tokens in (6, 100):
        text = block.replace("bfloat16", "float64").replace("=6)", f"={max_tokens})")
        torch.manual_seed(0)
        scope: dict[str, Any] = {}
        exec(compile(text, "README.md", "exec"), scope)
        grads = [scope[name].weight.grad for name in ("body", "head")]
        results.append((len(scope["step"]), grads, scope["metrics"]))
    (two, grads, metrics), (one, expected_grads, expected) = results
    assert (two, one) == (2, 1)
    torch.testing.assert_close(grads, expected_grads, rtol=0, atol=1e-12)
    torch.testing.assert_close(metrics, expected, rtol=1e-12, atol=1e-12)


@contextmanager
def suppress_missing(*packages: str) -> Iterator[None]:
    """Lets an import of these packages fail, and of no others."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_import_what_there_is(page: Path) -> None:
    for block in _blocks(page, "python"):
        for node in ast.parse(block).body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            # Of trainers that the tests do not install, and that tests/peers does.
            with suppress_missing("megatron", "torchtitan", "verl"):
                exec(compile(ast.Module([node], type_ignores=[]), str(page), "exec"))


def test_the_config_of_the_readme_is_valid() -> None:
    (text,) = _blocks(ROOT / "README.md", "yaml")
    config = parse_config(RunConfig, parse_yaml(text))
    assert [phase.type for phase in config.phases] == ["supervised", "rl"]


def test_the_configs_of_the_examples_are_valid() -> None:
    examples = {path.name: path for path in (ROOT / "examples").glob("**/*.yaml")}
    assert {"llama_grpo.yaml", "llama_gspo.yaml"} <= set(examples)
    for path in examples.values():
        assert load_config(RunConfig, path).phases


def test_the_errors_that_the_docs_show_are_those_one_gets() -> None:
    policy = {"policy": {"type": "gspo", "epsilon_hgih": 4e-4}}
    phases = [{"type": "supervised", "steps": 1}, {"type": "rl", "steps": 1, "losses": policy}]
    with pytest.raises(ConfigError) as caught:
        parse_config(
            RunConfig,
            {"learning_rate": 1e-3, "phases": phases},
            ["phases.1.optimizer.learning_rate=fast"],
            source="run.yaml",
        )
    shown = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines()
    told = str(caught.value).splitlines()
    assert len(told) == 3
    assert set(told) <= set(shown)
