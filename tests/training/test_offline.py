"""RL on rollout files that another run's model sampled, without an environment."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import fmean

import pytest
import torch

from fastrl.cli import main
from fastrl.config import UserError
from fastrl.data.rollouts import read_rollouts
from fastrl.training.log_files import iter_metrics
from tests.helpers.runs import FinishedRun, begin_phase, final_weights, tiny_context

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "make_rollouts.py"

OFFLINE = """
dtype: float64
model: {{type: pretrained, path: {model}}}
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
def test_b6_offline_from_one_run_to_another(
    tmp_path: Path,
    finished: FinishedRun,
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollouts = tmp_path / f"rollouts.{suffix}"
    arguments = [str(finished.folder), str(rollouts), "--steps", "4", "--checkpoint", "rl-000016"]
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
    last = capsys.readouterr().out.splitlines()[-1]
    records = [*iter_metrics(run)]
    ends = {
        name: [record[f"policy/{name}"] for record in (records[0], records[-1])]
        for name in ("clip_fraction", "kl_old_new")
    }
    clip, kl = ends["clip_fraction"], ends["kl_old_new"]
    assert last.partition(" (gspo, ")[0] == (
        f"reward of the files: {fmean(record['reward'] for record in records):.2f}, "
        f"clip fraction: {clip[0]:.3f} -> {clip[1]:.3f}, "
        f"KL(old, new): {kl[0]:.4f} -> {kl[1]:.4f}"
    )
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


def test_columns_of_a_file_by_name(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    record = {"tokens": [1, 2, 0], "prompt_length": 1, "logprobs": [-1.0, -2.0], "source": "web"}
    rollouts.write_text(
        "".join(
            json.dumps(record | {"group_id": 0, "right": right, "form": 1 - right}) + "\n"
            for right in (0.0, 1.0)
        ),
        encoding="utf-8",
    )
    files = {"type": "files", "paths": [str(rollouts)], "documents_per_step": 2}
    named = files | {"ignore": ["source"], "reward_columns": {"right": 1.0, "form": 0.25}}
    overrides = ["phases.1.advantage.scale=none", f"phases.1.rollouts={json.dumps(named)}"]
    config, context = tiny_context("environment.heldout_prompts=1", *overrides)
    step = begin_phase(config, 1, context).source.next()
    assert sorted(document.reward or 0.0 for document in step.documents) == [0.25, 1.0]
    files["ignore"] = ["source", "tokens"]
    config, context = tiny_context(f"phases.1.rollouts={json.dumps(files)}")
    with pytest.raises(UserError, match=r"must not name \['tokens'\], which are read"):
        begin_phase(config, 1, context)


def test_a_checkpoint_that_is_not_there_is_one_message(
    tmp_path: Path,
    finished: FinishedRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    arguments = [str(finished.folder), str(rollouts), "--checkpoint", "none"]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "none/config.json: cannot be read: No such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
