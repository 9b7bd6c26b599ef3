"""What `fastrl train`, `eval` and `sample` do."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fastrl.config import RunConfig, UserError, load_config, save_config
from fastrl.config.training import LoggingConfig
from fastrl.training.checkpoint import TrainerState, latest_checkpoint, load_trainer_state
from fastrl.training.evaluate import evaluate as score_heldout
from fastrl.training.interrupt import StopRequest
from fastrl.training.loop import Trainer
from fastrl.training.metrics import MetricsWriter, NoWriter, drop_records_after
from fastrl.training.order import seeded
from fastrl.training.phases import Phase
from fastrl.training.progress import open_display
from fastrl.training.report import write_report
from fastrl.training.setup import build_parts
from fastrl.training.sources import build_source

CONFIG_FILE = "config.yaml"


def train(config: RunConfig, run_dir: Path, *, resume: bool = False) -> int:
    """Trains as a config says and returns the exit code 0.

    Each of the processes of `config.parallel` calls it; the first one prints and writes.

    Nothing is written before the config, the environment, the model and the data of all phases have
    been found good.

    Args:
        config: of the run.
        run_dir: where everything goes; new or empty, unless `resume`.
        resume: go on from the latest checkpoint of `run_dir`.

    Raises:
        UserError: as `build_parts`, `Phase` and `Trainer.run`; a folder that is in
            use, or not that of a run to resume.
        KeyboardInterrupt: Ctrl-C; after the first one the step is finished and the run saved.
    """
    started = time.monotonic()
    checkpoint = _checkpoint_to_resume(config, run_dir) if resume else None
    if checkpoint is None:
        _check_unused(run_dir)
    _check_packages(config.logging)
    parts = build_parts(config, checkpoint=checkpoint, spread=True)
    is_main = parts.processes.is_main
    state = TrainerState() if checkpoint is None else _state_to_resume(config, checkpoint)
    for later in range(state.phase + 1, len(config.phases)):
        build_source(config, later, parts)  # so that its errors come now
    phase = Phase(config, state.phase, parts)
    if state.optimizer is not None:
        phase.restore(state)
    writer: MetricsWriter | NoWriter = NoWriter()
    if is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, run_dir / CONFIG_FILE)
        if checkpoint is not None:
            drop_records_after(run_dir, state.step, None if state.phase_step else phase.name)
        writer = MetricsWriter(
            run_dir, tensorboard=config.logging.tensorboard, first_step=state.step
        )
    console = Console(quiet=not is_main)
    display = open_display(console)
    try:
        trainer = Trainer(config, run_dir, parts, phase, state, writer, display, started)
        with StopRequest(lambda: display.message("stopping after this step ...")) as stop:
            finished = trainer.run(stop)
    finally:
        display.close()
        writer.close()
    parts.processes.close()
    end = trainer.summary() if finished else f"stopped after step {trainer.state.step}"
    if config.logging.report and is_main:
        write_report(run_dir, title=f"{run_dir.name}: {end}")
    if not finished:
        _say(console, f"{end} and saved; go on with --resume")
        raise KeyboardInterrupt
    _say(console, end)
    return 0


def evaluate(run_dir: Path, overrides: Sequence[str]) -> int:
    """Scores a run's latest checkpoint on the held-out prompts and returns the exit code 0.

    Args:
        run_dir: of the run.
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
    parts = build_parts(config, checkpoint=checkpoint)
    assert parts.environment is not None
    parts.generator.manual_seed(seeded(config.seed, "evaluation").getrandbits(63))
    evaluation = score_heldout(config.evaluation, parts.environment, parts.tokenizer, parts.sampler)
    console = Console()
    _say(
        console,
        f"{checkpoint.name}: {len(parts.environment.heldout)} held-out prompts x "
        f"{config.evaluation.samples_per_prompt}, temperature {config.evaluation.temperature:g}, "
        f"solved {evaluation.solved:.3f}, finished {evaluation.finished:.3f}",
    )
    _say(console, f"held-out reward: {evaluation.reward:.3f}")
    return 0


def sample(
    run_dir: Path,
    prompt: str,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    num: int = 1,
) -> int:
    """Prints completions of a prompt by a run's latest checkpoint and returns the exit code 0.

    Args:
        run_dir: of the run.
        prompt: as the model reads it.
        max_tokens: longest completion; default: `sampler.max_new_tokens` of the run.
        temperature: of sampling, 0 for greedy; default: `evaluation.temperature` of the run.
        num: number of completions.

    Raises:
        UserError: no such run, or a prompt that its tokenizer cannot read.
    """
    overrides = [] if max_tokens is None else [f"sampler.max_new_tokens={max_tokens}"]
    config = load_config(RunConfig, run_dir / CONFIG_FILE, overrides)
    parts = build_parts(config, checkpoint=latest_checkpoint(run_dir), with_environment=False)
    tokens = parts.tokenizer.encode(prompt)
    if not tokens:
        raise UserError("the prompt must have at least one token, got an empty one")
    if temperature is None:
        temperature = config.evaluation.temperature
    parts.generator.manual_seed(seeded(config.seed, "sample").getrandbits(63))
    (completions,) = parts.sampler.sample([tokens], num_each=num, temperature=temperature)
    console = Console()
    for completion in completions:
        _say(console, f"{prompt}{parts.tokenizer.decode(completion.tokens)}")
    return 0


def _checkpoint_to_resume(config: RunConfig, run_dir: Path) -> Path:
    before = load_config(RunConfig, run_dir / CONFIG_FILE)
    if before != config:
        changed = [
            name
            for name in RunConfig.model_fields
            if getattr(before, name) != getattr(config, name)
        ]
        raise UserError(
            f"{run_dir}: a run goes on with the config it began with, but {', '.join(changed)} "
            f"differ from {CONFIG_FILE} there"
        )
    return latest_checkpoint(run_dir)


def _state_to_resume(config: RunConfig, checkpoint: Path) -> TrainerState:
    """Returns the state of a checkpoint, at the beginning of the next phase if one has ended."""
    state = load_trainer_state(checkpoint)
    has_ended = state.phase_step == config.phases[state.phase].steps
    if not has_ended or state.phase + 1 == len(config.phases):
        return state
    return replace(state, phase=state.phase + 1, phase_step=0, position=0, optimizer=None)


def _check_unused(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir}: must be a folder, is a file")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise UserError(
            f"{run_dir}: must be new or empty; choose another --run-dir, remove it, or go on with "
            "the run in it with --resume"
        )


def _check_packages(config: LoggingConfig) -> None:
    wanted = {"tensorboard": config.tensorboard, "matplotlib": config.report}
    options = {"tensorboard": "logging.tensorboard", "matplotlib": "logging.report"}
    for package, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise UserError(
                f"`{options[package]}` needs the {package} package; install it with: "
                f"pip install 'fastrl[examples]', or set it to false"
            )


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
