"""No command looks for anything beyond this machine, nor do the packages that it uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# What asks a package to stay at home; without it they must as well.
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def run(folder: Path, *arguments: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.no_network", str(folder), *arguments],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hub")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_no_command_opens_a_connection(tmp_path: Path) -> None:
    """Nor does a model's name become a download: it is a folder that is not there."""
    result, errors = run(tmp_path)
    assert result["found"] == []
    codes = result["codes"]
    assert codes.pop("train a name") == 2
    assert "meta-llama/Llama-3.2-1B" in errors
    assert set(codes.values()) == {0}, (codes, errors)


def test_a_connection_would_be_seen(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "plant")
    assert result["found"] == ["socket.getaddrinfo example.org", "socket.connect 192.0.2.1"]
