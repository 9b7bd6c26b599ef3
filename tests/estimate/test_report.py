"""What `fastrl estimate` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastrl.cli import main
from tests.helpers.runs import write_tiny


def printed(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    assert main(["estimate", str(write_tiny(folder)), *arguments]) == 0
    return capsys.readouterr().out


def test_both_tables_of_each_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, tmp_path, "--tokens", "4096", "parallel.sequence_data=2")
    assert "over 2 rank(s)" in text
    assert text.count("4,096 tokens a packed sequence") == text.count("phase ") == 2
    assert text.count("single_pass, 1 chunk of 2,048 rows") == 2
    assert text.count("optimizer states (AdamW)") == 2
    assert text.count("sequence_data: all_gather of keys and values") == 2


def test_the_items_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, tmp_path, "--tokens", "65536", "model.head.strategy=recompute")
    assert "recompute" in text
    block = text.split("memory of one rank")[1].split("sent by")[0]
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    sizes = [float(n) * units[u] for n, u in re.findall(r"([\d.]+) ([KMG]iB|B)\n", block)]
    assert len(sizes) > 5
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], rel=0.01)


def test_the_strategy_follows_the_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gspo = "phases.1.losses.policy={type: gspo}"
    assert "policy: single_pass, 1 chunk" in printed(capsys, tmp_path, gspo)
    assert "policy: recompute" in printed(capsys, tmp_path, gspo, "parallel.sequence_data=2")
    chunks = printed(capsys, tmp_path, gspo, "--tokens", "8192", "model.head.chunk_size=4096")
    assert "policy: single_pass, 2 chunks of 4,096 rows" in chunks
    kl = printed(capsys, tmp_path, "phases.1.losses.policy.kl={coefficient: 0.1}")
    assert "reference model" in kl.split("phase ")[2]


def test_a_strategy_that_is_not_possible_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["phases.1.losses.policy={type: gspo}", "model.head.strategy=single_pass"]
    config = str(write_tiny(tmp_path))
    assert main(["estimate", config, *arguments, "parallel.sequence_data=2"]) == 2
    error = capsys.readouterr().err
    assert "`phases.1`: `strategy: single_pass` must have" in error
    assert "documents are split over ranks" in error
