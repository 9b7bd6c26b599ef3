"""The benchmark runs on a tiny shape; its rows have the keys that tables and checks read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import checkpoint, host_time, lm_head, replay, sampler, table, update_bars
from benchmarks.cases import SHAPES, make_case
from benchmarks.ours import OURS
from benchmarks.peers import PEERS
from benchmarks.products import Products, operations

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
    single_pass = next(row for row in timed if row["implementation"] == "fastrl")
    assert "| implementation | ms | TFLOP/s | x floor" in text
    assert f"| {single_pass['time_ms']:.1f} | {single_pass['tflops']:.0f} |" in text


def test_the_rate_counts_the_products_that_are_executed() -> None:
    case = make_case(SHAPES["tiny"], "cpu")
    labelled, active = 90, 66
    for passes, expected in (
        (
            "fwdbwd",
            {
                ("fastrl", "single_pass"): 3 * active,
                ("fastrl", "recompute"): 4 * active,
                ("fastrl, metrics", "single_pass"): labelled + 2 * active,
                ("fastrl GSPO", "recompute"): 4 * active,
                ("torch eager", "logits"): 3 * 128,
                ("TRL ChunkedLogProb", "recompute"): 4 * labelled,
                ("Liger FLSCE", "recompute"): 4 * 128,
                ("quack chunked cross-entropy, not GRPO", "chunks"): 3 * 128,
                ("Apple CCE", "recompute, filtered"): None,
            },
        ),
        ("fwd", {("fastrl", "single_pass"): labelled, ("torch eager", "logits"): 128}),
    ):
        for each in (*OURS, *PEERS):
            key, products = (each.name, each.strategy), each.executed(passes)
            if key in expected:
                rows = None if products is None else operations(case, products) / (2 * 64 * 1000)
                assert rows == expected.pop(key), key
        assert not expected
    assert lm_head.rate(case, (Products("active", "fhw"),), 1e-3) == pytest.approx(25.344)
    assert lm_head.rate(case, None, 1.0) is None


def test_cross_entropy_is_held_to_torch() -> None:
    case = make_case(replace(SHAPES["tiny"], dtype=torch.float32), "cpu")
    truth = lm_head.make_truths(case, {"cross_entropy"})["cross_entropy"]
    loss = F.cross_entropy(case.hidden_states @ case.weight.t(), case.labels)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (case.hidden_states, case.weight))
    torch.testing.assert_close(truth.loss, loss.detach())
    torch.testing.assert_close(truth.grad_hidden, grad_hidden)
    torch.testing.assert_close(truth.grad_weight, grad_weight)


def test_a_checkpoint_of_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "checkpoint.json"
    arguments = ["checkpoint", "--shape", "tiny", "--reference", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--folder", str(tmp_path), "--json", str(file)])
    checkpoint.main()
    assert "background" in capsys.readouterr().out
    waits, goes_on = json.loads(file.read_text())
    assert waits["bytes"] == goes_on["bytes"] > 10**6
    for row in (waits, goes_on):
        assert 0 < row["blocking_ms"] <= 1e3 * row["total_s"] + 1
        assert row.keys() >= {"first_blocking_ms", "gpu", "torch", "commit"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.json"]


def test_the_sampler_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sampler.json"
    sizes = ["--model", "tiny", "--sequences", "8", "--prompt", "4", "--new", "6", "--steps", "1"]
    monkeypatch.setattr("sys.argv", ["sampler", *sizes, "--json", str(file)])
    sampler.main()
    rows = json.loads(file.read_text())["rows"]
    variants = ["launched", "graph"]
    for what in ("prompts", "step", "training step"):
        others = [] if what == "training step" else [sampler.ANY]
        assert [row["variant"] for row in rows if row["what"] == what] == [*variants, *others]
    step = next(row for row in rows if row["what"] == "training step")
    assert step["sampled_tokens"] == 48
    assert step["sampling_s"] + step["update_s"] <= step["seconds"] + 2e-3


def test_a_bar_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", "tiny", "--rows", "ranks", "--json", str(tmp_path / "bars.json")]
    monkeypatch.setattr("sys.argv", ["update_bars", *arguments])
    with torch._dynamo.config.patch(recompile_limit=8):  # back to what it was
        update_bars.main()
    (row,) = json.loads((tmp_path / "bars.json").read_text())
    assert 1 <= row["value"] <= row["least"]
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    text = table.with_tables("<!-- bars bars -->\n<!-- end -->\n")
    assert f"| {row['what']} | auto | {row['value']:.3f} | 1.050 | 1.020 |  |  |\n" in text


def test_recorded_sets_of_a_tiny_head() -> None:
    with_gradients, evaluation = replay.measure("tiny", 1.0, repeats=1, warmup=0)
    assert with_gradients["rows"] == 66
    assert max(with_gradients["error_hidden"], with_gradients["error_weight"]) < 3e-3
    assert evaluation["time_ms"] > 0


def test_recorded_sets_have_the_sizes_that_were_seen() -> None:
    case = make_case(replace(SHAPES["tiny"], num_tokens=8192, rows_labelled=None), "cpu")
    kept = replay.recorded_sets(case, 1.0)
    sizes = kept.slots.bincount(minlength=8192)[case.labels != -100].double()
    assert sizes.mean() == pytest.approx(8, rel=0.1)
    assert sizes.median() == 2
    assert sizes.quantile(0.99) == pytest.approx(82, rel=0.2)
    assert (sizes == 1).double().mean() == pytest.approx(0.465, abs=0.02)


def test_published_tables_say_what_the_files_say() -> None:
    for page in table.PAGES:
        text = page.read_text()
        assert table.MARKED.search(text)
        assert table.with_tables(text) == text


RUN = {"gpu": "a GPU", "torch": "2.13", "triton": "3.7", "commit": "0123456789", "dirty": False}
SECTIONS = {
    "memory": (
        [
            {"case": "1B", "kind": "step", "tokens": 4096, "moment": "update"}
            | {"predicted": 3 * 2**29, "measured": 2**30, **RUN},
        ],
        "| step: 1B | 4096 | update | 1.500 | 1.000 | 1.500 |",
    ),
    "slabs": (
        [{"shape_name": "tiny", "full_ms": 2.0, "even_ms": 3.0, "even_over_full": 1.5, **RUN}],
        "| tiny | 2.00 | 3.00 | 1.500 |",
    ),
    "replay": (
        [
            {"shape_name": "tiny", "mean_entries": 8.84, "passes": "fwd", "ratio": 0.5, **RUN}
            | {"time_ms": 1.0, "floor_ms": 2.0}
        ],
        "| tiny | 8.8 | log-probabilities | 1.00 | 2.00 | 0.500 |  |  |  |",
    ),
    "sampler": (
        {"model": "1B", "sequences": 64, "prompt": 200, "new": 400, **RUN}
        | {
            "rows": [
                {"what": "step", "variant": "graph", "time_ms": 2.5, "capture_ms": 20.4}
                | {
                    "kernels_ms": {"products": 1.0, "attention": 0.5}
                    | {"sampling": 0.25, "rest": 0.25, "number": 500}
                },
            ]
        },
        "| graph | 2.50 | 1.00 | 0.50 | 0.25 | 0.25 | 0.50 | 500 | 20 |",
    ),
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_section_appears_with_its_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    empty = f"<!-- {kind} {kind} -->\n<!-- end -->\n"
    assert table.with_tables(empty.replace("<!-- end", "old\n<!-- end")) == empty
    rows, line = SECTIONS[kind]
    (tmp_path / f"{kind}.json").write_text(json.dumps(rows))
    lines = table.with_tables(empty).splitlines()
    assert lines[1].startswith("## ")
    assert line in lines


def test_the_host_times_of_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "host.json"
    arguments = ["host_time", "--shape", "tiny", "--repeats", "1", "--warmup", "0"]
    monkeypatch.setattr("sys.argv", [*arguments, "--json", str(file)])
    host_time.main()
    rows = json.loads(file.read_text())
    assert [(row["strategy"], row["metrics"]) for row in rows] == [
        ("single_pass", False),
        ("single_pass", True),
        ("recompute", False),
        ("recompute", True),
    ]
    assert all(row["time_ms"] > row["backward_ms"] > 0 for row in rows)
    assert all(row["after_wait_ms"] > 0 for row in rows)
