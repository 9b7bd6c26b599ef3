"""The long run sees what grows, and a short one goes through."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.long_run.__main__ import compared, main
from tests.long_run.process import held


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_process_takes_is_seen(tmp_path: Path) -> None:
    before = held()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    tensor = torch.ones(30 * 2**20, dtype=torch.uint8)
    with (tmp_path / "open").open("w", encoding="utf-8"):
        after = held()
    ended.set()
    thread.join()
    assert after["handles"] == before["handles"] + 1
    assert after["threads"] >= before["threads"] + 1
    assert after["resident_bytes"] > before["resident_bytes"] + 0.8 * len(tensor)


@pytest.mark.parametrize(
    ("name", "before", "after", "has_grown"),
    [
        ("resident_bytes", 1000, 1010, False),
        ("resident_bytes", 1000, 1011, True),
        ("resident_bytes", 1000, 500, False),
        ("handles", 10, 11, True),
        ("handles", 10, 10, False),
        ("compiled_graphs", 0, 1, True),
    ],
)
def test_growth_is_told(name: str, before: int, after: int, has_grown: bool) -> None:
    records: list[dict[str, Any]] = [{"phase": "rl", "step": 1, name: n} for n in (before, after)]
    expected = [f"here: `{name}` has grown from {before:,} to {after:,}"]
    assert compared("here", *records) == (expected if has_grown else [])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_a_short_one_tells_what_is_held_in_each_phase(tmp_path: Path) -> None:
    file = tmp_path / "held.json"
    main(["--steps", "3", "--first", "2", "--json", str(file)])  # too short for a verdict
    (records,) = json.loads(file.read_text(encoding="utf-8"))["held"]
    steps = [(record["phase"], record["step"]) for record in records]
    assert steps == [("sampler", 2), ("sampler", 3), ("files", 2), ("files", 3)]
    assert all(record["resident_bytes"] > 2**20 for record in records)
