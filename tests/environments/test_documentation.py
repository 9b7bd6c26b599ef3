"""docs/adding_an_environment.md: its class is trained on, and its message is what one gets."""

import re
import sys
from pathlib import Path

import pytest

from fastrl.cli import main
from fastrl.training.log_files import iter_metrics

PAGE = Path(__file__).parent.parent.parent / "docs" / "adding_an_environment.md"


def _blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found


def test_the_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (task,), (config,) = _blocks("python"), _blocks("yaml")
    Path("product.py").write_text(task, encoding="utf-8")
    Path("run.yaml").write_text(config, encoding="utf-8")
    quiet = ["logging.report=false", "logging.tensorboard=false"]
    assert main(["train", "run.yaml", "--run-dir", "run", *quiet]) == 0
    records = [record for record in iter_metrics(Path("run")) if "reward" in record]
    assert [record["score_timeouts"] for record in records] == [0] * 5
    # An untrained model writes much that is no number, which `int` refuses.
    assert all(0 < record["score_errors"] < 32 * 16 for record in records)
    assert main(["eval", "run"]) == 0
    assert main(["sample", "run", "3*4="]) == 0
    capsys.readouterr()

    (shown,) = _blocks("text")
    # As in a new process, which reads the file anew.
    for name in [name for name in sys.modules if name.startswith("product_")]:
        monkeypatch.delitem(sys.modules, name)
    Path("product.py").write_text(task.replace('f"{a}*{b}="', "3"), encoding="utf-8")
    assert main(["train", "run.yaml", "--run-dir", "again"]) == 2
    assert capsys.readouterr().err == shown
