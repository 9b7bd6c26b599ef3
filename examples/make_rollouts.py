"""Samples rollouts with a run's model and writes them to a file, for `rollouts: {type: files}`.

    python examples/make_rollouts.py runs/grpo rollouts.jsonl --steps 50

The prompts are training prompts of the run's environment, groups and temperature those of its first
RL phase that samples. A file in this form may as well come from any other program: docs/data.md.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fastrl.config import RunConfig, load_config
from fastrl.data.documents import Document
from fastrl.data.rollouts import write_rollouts
from fastrl.training.checkpoint import latest_checkpoint
from fastrl.training.rollouts import SampledRollouts
from fastrl.training.setup import build_parts


def sampled(run: Path, steps: int) -> Iterator[Document]:
    """Yields documents with reward and group, and without advantages."""
    config = load_config(RunConfig, run / "config.yaml")
    phase = next(p for p in config.phases if p.type == "rl" and p.rollouts.type == "sampler")
    parts = build_parts(config, checkpoint=latest_checkpoint(run))
    assert parts.environment is not None
    parts.generator.manual_seed(config.seed)
    source = SampledRollouts(
        phase.rollouts,
        phase.advantage,
        parts.environment,
        parts.tokenizer,
        parts.sampler,
        seed=f"{config.seed}/rollouts",
    )
    for step in range(steps):
        for document in source.next().documents:
            group_id = step * phase.rollouts.prompts_per_step + int(document.group_id or 0)
            yield replace(document, group_id=group_id, advantage=None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("file", type=Path, help="a new .jsonl or .parquet file")
    parser.add_argument("--steps", type=int, default=50, help="steps of the phase to sample")
    arguments = parser.parse_args()
    number = write_rollouts(arguments.file, sampled(arguments.run, arguments.steps))
    print(f"{arguments.file}: {number} documents")
