"""What is estimated is what a GPU holds: the head alone, and training steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory_cases import HEADS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = ("1B, fp32", "1B, bf16, checkpoints", "1B, bf16, pieces", "0.6B, fp32, recompute")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The benchmark's rows, from a process of its own: nothing else holds memory there."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU, which is what is estimated")
    file: Path = tmp_path_factory.mktemp("memory") / "memory.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--json", str(file)]
    done = subprocess.run(
        [*command, "--cases", ";".join((*HEADS, *STEPS))],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {row["case"]: row for row in json.loads(file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", [*HEADS, *STEPS])
def test_the_peak_is_estimated_within_five_percent(
    rows: dict[str, dict[str, Any]], name: str
) -> None:
    row = rows[name]
    assert row["predicted"] == pytest.approx(row["measured"], rel=0.05), row
