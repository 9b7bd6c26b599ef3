"""The run: phase after phase, evaluations between them, checkpoints, and where it was stopped."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

from fastrl.config.base import UserError
from fastrl.config.phases import RLPhaseConfig
from fastrl.config.training import RunConfig
from fastrl.training.checkpoint import TrainerState, save_checkpoint
from fastrl.training.evaluate import Evaluation, evaluate
from fastrl.training.interrupt import StopRequest
from fastrl.training.metrics import MetricsWriter, NoWriter
from fastrl.training.order import seeded
from fastrl.training.phases import Phase, StepResult
from fastrl.training.progress import Display
from fastrl.training.setup import Parts


class Trainer:
    """Runs the phases of a config.

    Args:
        config: of the run.
        run_dir: folder of the run, which exists.
        parts: model, environment and sampler.
        phase: the phase to begin with, built already so that its errors come before the folder.
        state: where to go on; at its phase, with the optimizer's state in `phase` already.
        writer: of the metrics.
        display: for the person in front of it.
        started: `time.monotonic()` of the run's begin.

    Attributes:
        state: where the run is.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        parts: Parts,
        phase: Phase,
        state: TrainerState,
        writer: MetricsWriter | NoWriter,
        display: Display,
        started: float,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._parts = parts
        self._phase = phase
        self._writer = writer
        self._display = display
        self._started = started - state.seconds
        self._saved_at = (state.phase, state.phase_step) if state.step else None
        self.state = state
        self._losses: list[float] = []  # of the phase
        self._final: Evaluation | None = None

    @property
    def seconds(self) -> float:
        """Time of the run so far, all its parts together."""
        return time.monotonic() - self._started

    def run(self, stop: StopRequest) -> bool:
        """Trains to the end, or to the end of the step in which `stop` was requested.

        Returns:
            Whether the run came to its end. The checkpoint is written in both cases.

        Raises:
            UserError: a loss or a gradient is not finite.
        """
        while True:
            if not self._run_phase(stop):
                self._save()
                return False
            if self.state.phase + 1 == len(self._config.phases):
                break
            self._save()
            self.state = replace(self.state, phase=self.state.phase + 1, phase_step=0)
            self._phase = Phase(self._config, self.state.phase, self._parts)
        self._final = self._evaluate()
        self._save()
        return True

    def summary(self) -> str:
        """Returns the last line of a run that came to its end.

        It compares the held-out reward before the last phase with that after it, or, in a run
        without an environment, the first and last loss of that phase.
        """
        losses = self._config.losses_of(self._phase.config).values()
        how = f"({'+'.join(loss.type for loss in losses)}, {self.seconds:.0f} s)"
        if self._final is not None:
            return (
                f"held-out reward: {self.state.rewards[-1]:.2f} -> {self._final.reward:.2f} {how}"
            )
        ends = f"{self._losses[0]:.4f} -> {self._losses[-1]:.4f}" if self._losses else "no steps"
        return f"loss: {ends} {how}"

    def _run_phase(self, stop: StopRequest) -> bool:
        phase, config = self._phase, self._phase.config
        if len(self.state.rewards) == self.state.phase:  # not so after a resumption within a phase
            evaluation = self._evaluate()
            reward = math.nan if evaluation is None else evaluation.reward
            self.state = replace(self.state, rewards=(*self.state.rewards, reward))
        self._losses = []
        self._display.begin_phase(phase.name, config.steps, phase.steps_done)
        while phase.steps_done < config.steps:
            if self._parts.processes.any(stop.requested):
                return False
            self._step(phase)
            last = phase.steps_done == config.steps
            every = self._config.evaluation.every
            if every is not None and phase.steps_done % every == 0 and not last:
                self._evaluate()
            every = self._config.checkpoint.every
            if every is not None and phase.steps_done % every == 0 and not last:
                self._save()
        return True

    def _step(self, phase: Phase) -> None:
        begin = time.monotonic()
        result = phase.step()
        seconds = time.monotonic() - begin
        self.state = replace(self.state, phase_step=phase.steps_done, step=self.state.step + 1)
        self._check_finite(result)
        if "loss" in result.metrics:
            self._losses.append(result.metrics["loss"])
        metrics = {
            **result.metrics,
            "tokens_per_second": result.num_tokens / seconds,
            "seconds": self.seconds,
        }
        self._writer.log(self.state.step, phase.name, metrics)
        self._display.step(metrics)
        if isinstance(phase.config, RLPhaseConfig):
            shows = (phase.steps_done - 1) % self._config.logging.samples_every == 0
            samples = result.samples[: self._config.logging.num_samples]
            if shows and samples:
                self._writer.log_samples(self.state.step, phase.name, samples)
                self._display.samples(samples)

    def _check_finite(self, result: StepResult) -> None:
        bad = [name for name, value in result.metrics.items() if not math.isfinite(value)]
        if bad:
            raise UserError(
                f"step {self.state.step} (phase `{self._phase.name}`): {', '.join(bad)} must be "
                "finite; the run ends here, its last checkpoint is as it was. Try a lower "
                "`optimizer.learning_rate` or `max_grad_norm`"
            )

    def _evaluate(self) -> Evaluation | None:
        parts = self._parts
        if parts.environment is None:
            return None
        parts.generator.manual_seed(seeded(self._config.seed, "evaluation").getrandbits(63))
        evaluation = evaluate(
            self._config.evaluation, parts.environment, parts.tokenizer, parts.sampler
        )
        values = {**evaluation.metrics(), "seconds": self.seconds}
        self._writer.log(self.state.step, self._phase.name, values)
        self._display.evaluation(evaluation)
        return evaluation

    def _save(self) -> None:
        place = (self.state.phase, self.state.phase_step)
        if place == self._saved_at:
            return
        state = self._phase.state(replace(self.state, seconds=self.seconds))
        save_checkpoint(
            self._run_dir,
            self._phase.name,
            self._parts.llama,
            state,
            keep=self._config.checkpoint.keep,
            writes=self._parts.processes.is_main,
        )
        self._saved_at = place
