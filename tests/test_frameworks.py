"""The recorded batch through the installed frameworks' own losses, and the stored results.

verl and torchtitan are run where they are installed (tests/peers/install).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.frameworks import __main__ as command
from benchmarks.frameworks import ours, table
from benchmarks.frameworks.batch import END, LIMIT, SPLITS, RecordedBatch
from benchmarks.frameworks.rows import TOLERANCE, compared, unexplained, worst

ROWS = {name: module.all_rows() for name, (_, module) in command.FRAMEWORKS.items()}
CASES = [
    pytest.param(row, id=f"{name}-{number}")
    for name, rows in ROWS.items()
    for number, row in enumerate(rows)
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded() -> RecordedBatch:
    return RecordedBatch.load()


def assert_as_named(result: dict[str, Any]) -> None:
    """Equal, or apart for the named reason in at least one split."""
    assert not unexplained(result), result
    apart = result["config"] is None or any(
        worst(found) > TOLERANCE for found in result["splits"].values()
    )
    assert apart == (result["reason"] is not None), result


@pytest.mark.parametrize("row", CASES)
def test_a_loss_of_a_framework(row: Any, recorded: RecordedBatch) -> None:
    if command.installed_version(command.FRAMEWORKS[row.framework][0]) is None:
        pytest.skip(f"{row.framework} is not installed")
    assert_as_named(compared(row, recorded))


def test_the_stored_results_are_of_these_rows() -> None:
    results = json.loads(command.FILE.read_text())
    assert all(results["versions"].values())
    stored = [(row["framework"], row["theirs"], row["config"]) for row in results["rows"]]
    assert stored == [(x.framework, x.theirs, x.config) for rows in ROWS.values() for x in rows]
    for row in results["rows"]:
        assert_as_named(row)


def test_the_batch_is_what_the_documents_say(recorded: RecordedBatch) -> None:
    piece = recorded.piece(range(12))
    lengths = piece.mask.sum(1).tolist()
    assert lengths.count(1) == 2
    assert max(lengths) == LIMIT
    truncated = recorded.without_truncated().piece(range(12)).mask.sum(1) == 0
    assert truncated.tolist() == [n == LIMIT for n in lengths]
    assert all(
        (ids[n - 1] == END) == (n < LIMIT) for ids, n in zip(piece.ids, lengths, strict=True)
    )
    assert (piece.advantages == 0).sum() == 3
    for split in SPLITS.values():
        assert sorted(n for rank in split for numbers in rank for n in numbers) == list(range(12))
    # On both sides of a clip, for either sign.
    ratio = (piece.statistics()[0] - piece.column("logprobs")).exp()
    for sign in (1, -1):
        of_sign = ratio[piece.mask & (piece.advantages[:, None] * sign > 0)]
        assert of_sign.min() < 0.85
        assert of_sign.max() > 1.25


def test_a_difference_is_not_equal_and_a_wrong_reason_does_not_explain_it(
    recorded: RecordedBatch,
) -> None:
    config = {"type": "grpo"}
    for name, split in SPLITS.items():
        ours_loss = ours.step_loss(config, recorded, split)
        means = ours.mean_of_means(config, recorded, split)
        assert (abs(ours_loss.item() - means.item()) > TOLERANCE) == (name != "one")
    apart = {"error_loss": 0.0, "error_gradient": 1e-3}
    row = {"config": config, "splits": {"one": apart}}
    assert unexplained(row) == ["one"]
    row["splits"] = {"one": apart | {"explained_error_loss": 1e-5, "explained_error_gradient": 0.0}}
    assert unexplained(row) == ["one"]


def test_a_framework_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, module = command.FRAMEWORKS["verl"]
    monkeypatch.setitem(command.FRAMEWORKS, "verl", ("no-such-distribution", module))
    file = tmp_path / "results.json"
    command.main(["--frameworks", "verl", "--json", str(file)])
    assert "verl is not installed" in capsys.readouterr().out
    results = json.loads(file.read_text())
    assert results["rows"] == []
    assert table.sections(results) == "#### verl\n\nNot run: verl is not installed.\n"
