"""The tiny run that faults are injected into, and what it gives when nothing happens."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.jobs import Ended, Prepare, run_job

CONFIG = """
seed: 3
dtype: float64
device: cpu
num_threads: 1
model: {{type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: {{type: character, characters: "0123456789+-= "}}
phases:
  - &phase
    type: rl
    name: first
    steps: 3
    losses: {{policy: {{type: grpo}}}}
    optimizer: {{learning_rate: 1e-2}}
    rollouts: {{type: files, paths: ["{rollouts}"], documents_per_step: 8}}
  - {{<<: *phase, name: second}}
checkpoint: {{every: 2, asynchronous: false}}
logging: {{tensorboard: false, report: false}}
"""
STEPS = 6
STOPPED = 5
CHECKPOINTS = (0, 2, 3, 5, 6)
"""Steps after which there is a checkpoint; 0 stands for none."""


def no_fault(rank: int) -> None:
    """A rank on which nothing happens."""


@dataclass(frozen=True)
class Result:
    """What a run gives.

    Attributes:
        files: SHA-256 of the files of the last checkpoint that do not hold times.
        metrics: records without times.
    """

    files: dict[str, str]
    metrics: list[dict[str, Any]]


@dataclass
class Shared:
    """What all injections read: the config, and what a run gives to which nothing happens.

    Attributes:
        folder: of all.
        results: by number of ranks.
    """

    folder: Path
    results: dict[int, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        write_rollouts(self.rollouts)
        self.config.write_text(CONFIG.format(rollouts=self.rollouts), encoding="utf-8")

    @property
    def rollouts(self) -> Path:
        return self.folder / "rollouts.jsonl"

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def stopped(self) -> Path:
        return self.folder / "stopped" / "run"

    def make(self, ranks: Sequence[int], stop: Prepare) -> None:
        """Makes the results, and the run that `stop` has stopped."""
        for number in ranks:
            place = Place(self.folder / f"reference{number}", number, self)
            ended = place.train()
            assert ended.codes == [0] * number, ended.err
            self.results[number] = place.result()
        place = Place(self.stopped.parent, 1, self)
        assert place.train(stop).codes == [143]
        assert place.saved == STOPPED


class Place:
    """A folder for one injection.

    Args:
        folder: new.
        num_ranks: of the job.
        shared: what all places read.

    Attributes:
        run: the run folder.
        config: of the run.
        timeout: `parallel.timeout` of jobs with several ranks.
    """

    def __init__(self, folder: Path, num_ranks: int, shared: Shared) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.num_ranks = num_ranks
        self.shared = shared
        self.run = folder / "run"
        self.config = shared.config
        self.timeout = 60

    def train(
        self, prepare: Prepare = no_fault, *overrides: str, resume: bool = False, limit: float = 60
    ) -> Ended:
        """A job on all ranks."""
        arguments = ["train", str(self.config), "--run-dir", str(self.run), *overrides]
        if self.num_ranks > 1:
            arguments += [f"parallel.data={self.num_ranks}", f"parallel.timeout={self.timeout}"]
        if resume:
            arguments.append("--resume")
        return run_job(arguments, self.num_ranks, prepare, self.folder, limit=limit)

    @property
    def checkpoint(self) -> Path:
        """The folder of the latest checkpoint."""
        name = (self.run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
        return self.run / "checkpoints" / name

    @property
    def saved(self) -> int:
        """The step of the latest checkpoint, 0 if there is none."""
        if not (self.run / "checkpoints" / "latest").exists():
            return 0
        return int(self.checkpoint.name.rpartition("-")[2])

    def result(self) -> Result:
        names = ("model.safetensors", "trainer/optimizer.safetensors", "tokenizer.json")
        files = {
            name: hashlib.sha256((self.checkpoint / name).read_bytes()).hexdigest()
            for name in names
        }
        return Result(files, self.metrics())

    def metrics(self) -> list[dict[str, Any]]:
        text = (self.run / "metrics.jsonl").read_text(encoding="utf-8")
        own = ("seconds", "tokens_per_second")
        return [
            {name: value for name, value in json.loads(line).items() if name not in own}
            for line in text.splitlines()
        ]

    def goes_on(self, *overrides: str) -> None:
        """Resumes, which must give what a run gives that was never stopped."""
        self.timeout = 60  # which may be another when a run goes on
        ended = self.train(no_fault, *overrides, resume=True)
        assert ended.codes == [0] * self.num_ranks, ended.err
        self.is_whole()

    def is_whole(self) -> None:
        """Asserts that the run has given what one gives to which nothing happened."""
        found = self.result()
        expected = self.shared.results[self.num_ranks]
        assert found.metrics == expected.metrics, "the metrics differ"
        assert found.files == expected.files, "the weights differ"

    def is_refused(self, ended: Ended, *words: str) -> None:
        """Asserts that ranks gave one message with exit code 2, if they had the time."""
        assert ended.codes[ended.first] == 2, (ended.codes, ended.err)
        assert set(ended.codes) <= {2, -signal.SIGTERM}, (ended.codes, ended.err)
        assert ended.err.startswith("fastrl: error: "), ended.err
        assert "Traceback" not in ended.err, ended.err
        for word in words:
            assert word in ended.err, (word, ended.err)

    def take_stopped_run(self) -> None:
        """Puts a run of one rank here that SIGTERM has stopped after step `STOPPED`."""
        shutil.copytree(self.shared.stopped, self.run)

    def own_rollouts(self) -> Path:
        """A copy of the rollouts that a config of this place's own names."""
        file = self.folder / "rollouts.jsonl"
        shutil.copy(self.shared.rollouts, file)
        self.config = self.folder / "run.yaml"
        self.config.write_text(CONFIG.format(rollouts=file), encoding="utf-8")
        return file


def write_rollouts(file: Path, *, num_groups: int = 6, seed: int = 0) -> None:
    """Documents in groups of four, with rewards and log-probabilities."""
    rng = random.Random(seed)
    lines = []
    for group in range(num_groups):
        prompt = [rng.randrange(1, 15) for _ in range(4)]
        for _ in range(4):
            completion = [rng.randrange(1, 15) for _ in range(rng.randrange(2, 6))]
            record = {
                "prompt_ids": prompt,
                "completion_ids": completion,
                "group_id": group,
                "reward": rng.random(),
                "logprobs": [-rng.uniform(1, 3) for _ in completion],
            }
            lines.append(json.dumps(record))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
