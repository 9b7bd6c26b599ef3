"""Samples rollouts with a run's model and writes them to a file, for `rollouts: {type: files}`.

    python examples/make_rollouts.py runs/grpo rollouts.jsonl --steps 50

The weights are those of the run's latest checkpoint, or of `--checkpoint`. The prompts are training
prompts of the run's environment, groups and temperature those of its first RL phase that samples;
groups that the phase drops for equal rewards are left out. A file in this form may as well come
from any other program: docs/data.md.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fastrl.config import RunConfig, UserError, load_config
from fastrl.data.documents import Document
from fastrl.data.rollouts import write_rollouts
from fastrl.training.checkpoint import CHECKPOINTS_FOLDER, latest_checkpoint
from fastrl.training.context import build_context
from fastrl.training.sampled_rollouts import SampledRollouts


def sampled(run: Path, checkpoint: Path, steps: int) -> Iterator[Document]:
    """Yields documents with reward and group, and without advantages."""
    config = load_config(RunConfig, run / "config.yaml")
    phase = next(p for p in config.phases if p.type == "rl" and p.rollouts.type == "sampler")
    context = build_context(config, checkpoint=checkpoint)
    assert context.environment is not None
    context.generator.manual_seed(config.seed)
    source = SampledRollouts(
        phase.rollouts,
        phase.advantage,
        context.environment,
        context.tokenizer,
        context.sampler,
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
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="such as supervised-000200 (default: the latest)"
    )
    parser.add_argument(
        "--steps", type=int, default=50, help="steps of the phase to sample (default: 50)"
    )
    arguments = parser.parse_args()
    run, name = arguments.run, arguments.checkpoint
    try:
        checkpoint = latest_checkpoint(run) if name is None else run / CHECKPOINTS_FOLDER / name
        number = write_rollouts(arguments.file, sampled(run, checkpoint, arguments.steps))
    except UserError as error:
        parser.error(str(error))
    print(f"{arguments.file}: {number} documents")
