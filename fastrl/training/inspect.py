"""`fastrl eval` and `fastrl sample`: the model of a run, evaluated or sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from fastrl.config import RunConfig, UserError, load_config
from fastrl.training.checkpoint import CONFIG_FILE, latest_checkpoint
from fastrl.training.context import build_context
from fastrl.training.display import print_line
from fastrl.training.evaluate import evaluate as score_heldout
from fastrl.training.order import seeded


def evaluate(run_dir: Path, overrides: Sequence[str]) -> int:
    """Prints the score of a run's latest checkpoint on held-out prompts; the exit code is 0.

    Args:
        run_dir: folder of the run.
        overrides: changes of its config, such as `evaluation.temperature=0`.

    Raises:
        UserError: no such run, or one without an environment.
    """
    config = load_config(RunConfig, run_dir / CONFIG_FILE, overrides)
    if config.environment is None:
        raise UserError(
            f"{run_dir / CONFIG_FILE}: the run has no `environment`, so there is no held-out reward"
        )
    checkpoint = latest_checkpoint(run_dir)
    context = build_context(config, checkpoint=checkpoint)
    assert context.environment is not None
    with closing(context.environment):
        evaluation = score_heldout(config, context)
    console = Console()
    print_line(
        console,
        f"{checkpoint.name}: {len(context.environment.heldout)} held-out prompts x "
        f"{config.evaluation.samples_per_prompt}, temperature {config.evaluation.temperature:g}, "
        f"solved {evaluation.solved:.3f}, finished {evaluation.finished:.3f}",
    )
    print_line(console, f"held-out reward: {evaluation.reward:.3f}")
    return 0


def sample(
    run_dir: Path,
    prompt: str,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    num: int = 1,
) -> int:
    """Prints completions of a prompt by a run's latest checkpoint; the exit code is 0.

    Args:
        run_dir: folder of the run.
        prompt: as the model reads it.
        max_tokens: longest completion; default: `sampler.max_new_tokens` of the run.
        temperature: of sampling, 0 for greedy; default: `evaluation.temperature` of the run.
        num: number of completions.

    Raises:
        UserError: no such run, or a prompt that its tokenizer cannot read.
    """
    overrides = [] if max_tokens is None else [f"sampler.max_new_tokens={max_tokens}"]
    config = load_config(RunConfig, run_dir / CONFIG_FILE, overrides)
    context = build_context(config, checkpoint=latest_checkpoint(run_dir), with_environment=False)
    tokens = context.tokenizer.encode(prompt)
    if not tokens:
        raise UserError("the prompt must have at least one token, got an empty one")
    if temperature is None:
        temperature = config.evaluation.temperature
    context.generator.manual_seed(seeded(config.seed, "sample").getrandbits(63))
    (completions,) = context.sampler.sample([tokens], num_each=num, temperature=temperature)
    console = Console()
    for completion in completions:
        print_line(console, f"{prompt}{context.tokenizer.decode(completion.tokens)}")
    return 0
