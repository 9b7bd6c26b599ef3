"""RL on rollout files that another run's model sampled, without an environment."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from fastrl.cli import main
from fastrl.data.rollouts import read_rollouts
from fastrl.training.metrics import read_metrics
from tests.training.conftest import FinishedRun
from tests.training.runs import final_weights

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "make_rollouts.py"

OFFLINE = """
dtype: float64
model: {{type: pretrained, path: {model}}}
tokenizer: {{type: character, characters: "0123456789+-= "}}
phases:
  - type: rl
    steps: 3
    losses: {{policy: {{type: gspo, epsilon_low: 0.2, epsilon_high: 0.2}}}}
    optimizer: {{learning_rate: 1e-3}}
    mini_batches: 2
    rollouts: {{type: files, paths: ["{rollouts}"], documents_per_step: 16}}
logging: {{tensorboard: false, report: true}}
"""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_offline_from_one_run_to_another(
    tmp_path: Path,
    finished: FinishedRun,
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollouts = tmp_path / f"rollouts.{suffix}"
    arguments = [str(finished.folder), str(rollouts), "--steps", "4"]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    documents = list(read_rollouts(rollouts))
    assert len(documents) == 4 * 6 * 4
    assert len({document.group_id for document in documents}) == 4 * 6
    assert {document.temperature for document in documents} == {1.0}

    model = finished.folder / "checkpoints" / "rl-000016"
    config = tmp_path / "offline.yaml"
    config.write_text(OFFLINE.format(model=model, rollouts=rollouts), encoding="utf-8")
    capsys.readouterr()
    run = tmp_path / "run"
    assert main(["train", str(config), "--run-dir", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("loss: ")
    records = read_metrics(run)
    assert len(records) == 3
    for record in records:
        assert 0 <= record["reward"] <= 1
        assert "heldout/reward" not in record
    before = final_weights(finished.folder)
    after = final_weights(run)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert (run / "report.png").exists()

    assert main(["eval", str(run)]) == 2
    assert "the run has no `environment`" in capsys.readouterr().err
    assert main(["sample", str(run), "1 + 1 ="]) == 0
