"""The benchmark of TRL's head runs on a tiny model; its rows have what a table needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import trl
from benchmarks.trl_case import PRECISIONS, Sizes, make_case

TINY = {
    "documents": 4, "length": 24, "prompt": 6, "inactive": 1, "hidden-size": 32,
    "intermediate-size": 64, "num-hidden-layers": 1, "num-attention-heads": 2,
    "num-key-value-heads": 1, "head-dim": 16, "vocab-size": 96, "repeats": 1, "warmup": 1,
}  # fmt: skip
KEYS = {
    "head", "precision", "documents", "length", "hidden_size", "vocab_size", "time_ms",
    "time_p20_ms", "time_p80_ms", "peak_bytes", "gpu", "torch", "commit", "dirty",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of TRL and transformers
def test_a_tiny_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trl.json"
    arguments = [f"--{name}={value}" for name, value in TINY.items()]
    monkeypatch.setattr("sys.argv", ["trl", *arguments, "--json", str(file)])
    assert trl.main() == 0
    rows = json.loads(file.read_text())
    assert [row["head"] for row in rows] == [*trl.HEADS] * 2
    for row in rows:
        if "reason" in row:
            assert row["reason"] == "fastrl.integrations.transformers is not there"
            continue
        assert row.keys() >= KEYS
        if row["head"] != "body alone":
            assert row["error_gradients"] < 1e-2
    assert "TRL with fastrl" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_head_with_a_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(**{k.replace("-", "_"): v for k, v in [*TINY.items()][:-2]})
    case = make_case(sizes, PRECISIONS[0], "cpu")
    right = trl.own_logits
    monkeypatch.setitem(trl.HEADS, "wrong", lambda case: lambda: 2 * right(case)())
    (row,) = trl.run_precision(case, ["wrong"], repeats=1, warmup=0)
    assert row["reason"].startswith("gate: gradient error ")
    assert "time_ms" not in row
