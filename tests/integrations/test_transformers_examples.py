"""The examples with a model of transformers: short, and they learn."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.helpers.torchrun import torchrun

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
NAMES = ("transformers_head", "lora", "fsdp2")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_sixty_lines_at_most(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60


def test_a_loop_of_ones_own_raises_the_reward(capsys: pytest.CaptureFixture[str]) -> None:
    first, last = runpy.run_path(str(EXAMPLES / "transformers_head.py"))["main"]()
    assert first < 0.2
    assert last > 0.8
    assert "documents are packed" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
def test_lora_learns_and_comes_off(capsys: pytest.CaptureFixture[str]) -> None:
    first, last, without = runpy.run_path(str(EXAMPLES / "lora.py"))["main"]()
    assert last < 0.5 < first
    assert without == pytest.approx(first, abs=1e-4)
    assert "loss " in capsys.readouterr().out


def test_two_ranks_learn() -> None:
    done = torchrun(2, str(EXAMPLES / "fsdp2.py"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.endswith("on 2 ranks") for line in lines)
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert losses[-1] < losses[0] - 0.5
