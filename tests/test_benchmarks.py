"""The benchmark runs on a tiny shape; its rows have the keys that tables and checks read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lm_head, table

KEYS = {
    "implementation", "strategy", "loss", "shape", "rows_labelled", "rows_active", "passes",
    "time_ms", "floor_ms", "floor_active_ms", "peak_bytes_over_inputs", "error_grad_hidden",
    "error_grad_weight", "gpu", "torch", "triton", "commit", "dirty",
}  # fmt: skip


def test_a_tiny_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.json"
    arguments = [
        "lm_head",
        "--shape",
        "tiny",
        "--impl",
        "fastrl,torch eager,Apple",
        "--repeats",
        "2",
    ]
    monkeypatch.setattr("sys.argv", [*arguments, "--warmup", "1", "--json", str(file)])
    lm_head.main()
    assert "single_pass" in capsys.readouterr().out
    rows = json.loads(file.read_text())
    timed = [row for row in rows if row["passes"] == "fwdbwd" and "time_ms" in row]
    assert {row["strategy"] for row in timed} == {"single_pass", "recompute", "logits"}
    for row in timed:
        if row["loss"] == "grpo":
            assert row.keys() >= KEYS
            assert row["error_grad_hidden"] < 3e-3
    assert all(row.get("reason") for row in rows if row["implementation"].startswith("Apple"))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    text = table.with_tables("a\n<!-- benchmark tiny -->\nold\n<!-- end -->\nb\n")
    assert "fastrl (single_pass)" in text
    assert "old" not in text


def test_published_tables_say_what_the_files_say() -> None:
    root = Path(table.__file__).parent.parent
    for file in ("README.md", "docs/performance.md", "docs/sharding.md"):
        text = (root / file).read_text()
        assert table.with_tables(text) == text
