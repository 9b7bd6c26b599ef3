"""The document on kernels: its code runs, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from fastrl import kernels
from tests.helpers.tile_cases import TILE_CASES, TileCase

pytestmark = [
    # numpy says what a GPU does silently: -inf - -inf, 0 * inf.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the page's tensors are on the CPU"),
]

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_kernel.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The page's code as a module: Triton reads a kernel's source from its file."""
    text = PAGE.read_text(encoding="utf-8")
    file = tmp_path_factory.mktemp("page") / "adding_a_kernel.py"
    file.write_text("".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", TILE_CASES, ids=lambda case: case.name)
def test_adding_a_kernel_works_as_documented(
    case: TileCase, page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Mock(side_effect=page.add_row_squares)
    monkeypatch.setattr(page, "add_row_squares", kernel)
    page.check(case)
    assert not kernel.called
    monkeypatch.setattr(kernels, "run_on_cpu", True)
    page.check(case)
    assert kernel.called


def test_the_benchmark_of_the_page_runs(page: ModuleType) -> None:
    case = TILE_CASES[0]
    times = page.measure(case.products(), case.transform, case.tile())
    assert times.keys() == {"kernel", "torch", "floor"}
