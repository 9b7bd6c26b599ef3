"""A training run: its phases, evaluations between them, checkpoints, resumption."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from fastrl.config import RunConfig, UserError, save_config
from fastrl.config.phases import RLPhaseConfig
from fastrl.training.check import check_packages
from fastrl.training.checkpoint import CONFIG_FILE
from fastrl.training.context import RunContext, build_context, processes_of
from fastrl.training.display import Display, open_display, print_line
from fastrl.training.evaluate import Evaluation, evaluate
from fastrl.training.file_summary import FileSummary
from fastrl.training.interrupt import StopRequest, exit_code
from fastrl.training.log_files import MetricsWriter, NoWriter, drop_records_after
from fastrl.training.phases import Phase, StepResult
from fastrl.training.processes import Processes
from fastrl.training.report import write_report
from fastrl.training.resume import Start, find_start, state_to_resume, with_inputs
from fastrl.training.rollout_sources import build_sources
from fastrl.training.rollouts import RolloutSource
from fastrl.training.run_folder import RunFolder
from fastrl.training.saving import CheckpointSaver
from fastrl.training.trackers import Tracker, open_trackers
from fastrl.training.trainer_state import TrainerState, is_format_1

_CANNOT_WRITE = 255
"""In place of a signal's number, and above all of them."""


def train(config: RunConfig, run_dir: Path, *, resume: bool = False) -> int:
    """Trains as a config says; the exit code is 0, or that of a signal that stopped the run.

    A run that Ctrl-C (130), SIGTERM (143) or SIGHUP (129) stopped has finished its step and saved.

    Each of the processes of `config.parallel` calls it; the first one prints and writes. Nothing is
    written before config, environment, model and the data of all phases have been checked.

    Args:
        config: of the run.
        run_dir: folder of the run; new or empty, unless `resume`.
        resume: whether to go on from the latest checkpoint of `run_dir`, if it has one. A finished
            run is left as it is.

    Raises:
        UserError: as `find_start`, `build_context`, `build_sources` and `Trainer.run`.
        KeyboardInterrupt: the second signal; its argument is the number.
    """
    started = time.monotonic()
    check_packages(config.logging)
    processes = processes_of(config)
    is_main = processes.is_main
    console = Console(quiet=not is_main)
    start = processes.from_main(lambda: find_start(config, run_dir, resume=resume))
    checkpoint = start.checkpoint
    if checkpoint is not None and start.is_finished:
        processes.close()
        print_line(console, f"{checkpoint.name} is the end of the run in {run_dir}: nothing to do")
        return 0
    context = build_context(config, checkpoint=checkpoint, processes=processes)
    state = TrainerState() if checkpoint is None else state_to_resume(config, checkpoint, context)
    sources = build_sources(config, context, first=state.phase)
    state = with_inputs(state, context, sources, run_dir)
    phase = Phase(config, state.phase, context, sources.pop(state.phase))
    if state.optimizer is not None:
        phase.restore(state)
    with ExitStack() as stack:
        if context.environment is not None:
            stack.callback(context.environment.close)
            context.environment.start()
        for source in (phase.source, *sources.values()):
            stack.callback(source.close)
            source.start()
        folder = stack.enter_context(_open_folder(config, run_dir, processes, start, resume=resume))
        writer = _open_writer(config, run_dir, state, start, processes, console)
        display = open_display(console)
        trainer = Trainer(config, folder, context, phase, sources, state, writer, display, started)
        with StopRequest(lambda: display.message("stopping after this step ...")) as stop:
            try:
                stopped_by = trainer.run(stop)
            finally:
                display.close()
                writer.close()
            end = f"stopped after step {trainer.state.step}" if stopped_by else trainer.summary()
            if config.logging.report and is_main:
                write_report(run_dir, config, title=f"{run_dir.name}: {end}")
            processes.close()
    print_line(console, f"{end} and saved; go on with --resume" if stopped_by else end)
    return exit_code(stopped_by) if stopped_by else 0


@contextmanager
def _open_folder(
    config: RunConfig, run_dir: Path, processes: Processes, start: Start, *, resume: bool
) -> Iterator[RunFolder]:
    """The folder of the run, locked by the process that writes; an error is all processes'."""
    with ExitStack() as stack:
        folder = RunFolder(run_dir, writes=processes.is_main)

        def lock() -> None:
            stack.enter_context(folder)
            if start.checkpoint is None and find_start(config, run_dir, resume=resume) != start:
                raise UserError(f"{run_dir}: another process has trained in it since; try again")

        processes.from_main(lock)
        yield folder


def _open_writer(
    config: RunConfig,
    run_dir: Path,
    state: TrainerState,
    start: Start,
    processes: Processes,
    console: Console,
) -> MetricsWriter | NoWriter:
    """The log files of a run, without the records after the state that it goes on from."""
    trackers: list[Tracker] = []
    processes.from_main(lambda: trackers.extend(open_trackers(config, run_dir)))
    if not processes.is_main:
        return NoWriter()
    save_config(config, run_dir / CONFIG_FILE)
    is_new = start.checkpoint is None and not start.begins_again
    if start.begins_again:
        drop_records_after(run_dir, -1, None)
    if start.checkpoint is not None:
        if is_format_1(start.checkpoint):
            name = start.checkpoint.name
            print_line(console, f"{name} is of format 1, without checksums; the next is of 2")
        is_evaluated = len(state.rewards) > state.phase
        new_phase = None if is_evaluated else config.phase_name(state.phase)
        for problem in drop_records_after(run_dir, state.step, new_phase):
            print_line(console, problem)
    return MetricsWriter(
        run_dir,
        tensorboard=config.logging.tensorboard,
        first_step=None if is_new else state.step,
        trackers=trackers,
    )


def _runs_ahead(device: torch.device) -> bool:
    """Whether the host goes on while the device is at work on what it was given."""
    return device.type == "cuda"


@dataclass(frozen=True)
class _UnreadStep:
    """A step that the device may still be at work on.

    Attributes:
        phase: of the step.
        phase_step: its number in the phase, from 1.
        step: its number in the run, from 1.
        begin: `time.monotonic()` before it.
        result: to be read.
        earlier: of the step that the device was still at work on; None if it had none.
    """

    phase: Phase
    phase_step: int
    step: int
    begin: float
    result: StepResult
    earlier: StepResult | None


class Trainer:
    """The loop over the phases of a config.

    Args:
        config: of the run.
        folder: of the run.
        context: model, environment and sampler.
        phase: the phase to begin with.
        sources: of the documents of the phases that follow; a phase takes its own.
        state: progress to resume from; the optimizer's state is in `phase` already.
        writer: of the metrics.
        display: of the progress.
        started: `time.monotonic()` at the start of the run.

    Attributes:
        state: progress of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        context: RunContext,
        phase: Phase,
        sources: dict[int, RolloutSource],
        state: TrainerState,
        writer: MetricsWriter | NoWriter,
        display: Display,
        started: float,
    ) -> None:
        self._config = config
        self._folder = folder
        self._context = context
        self._phase = phase
        self._sources = sources
        self._writer = writer
        self._display = display
        self._started = started - state.seconds
        self._saver = CheckpointSaver(folder.path, config, context.processes, display.message)
        is_new = state.optimizer is None and state.step == 0
        self._saved_at = None if is_new else (state.phase, state.phase_step)
        self.state = state
        self._on_files = FileSummary()
        self._final: Evaluation | None = None
        self._unread: _UnreadStep | None = None

    @property
    def seconds(self) -> float:
        """Time of the run so far, in seconds, resumed parts included."""
        return time.monotonic() - self._started

    def run(self, stop: StopRequest) -> int:
        """Trains to the end, or to the end of the step in which `stop` was requested.

        Returns:
            0 if the run is finished, else the number of the signal, on all processes. The
            checkpoint is written in both cases.

        Raises:
            UserError: a loss is not finite, or the gradients of too many updates are not; a
                checkpoint cannot be written.
        """
        with self._saver:
            return self._run(stop)

    def _run(self, stop: StopRequest) -> int:
        while True:
            stopped_by = self._run_phase(stop)
            if stopped_by:
                self._save()
                return stopped_by
            if self.state.phase + 1 == len(self._config.phases):
                break
            self._save()
            self._phase.source.close()
            index = self.state.phase + 1
            self.state = replace(self.state, phase=index, phase_step=0)
            self._phase = Phase(self._config, index, self._context, self._sources.pop(index))
        self._final = self._evaluate()
        self._save()
        return 0

    def summary(self) -> str:
        """The last line of a finished run.

        The held-out reward before and after the last phase or, without an environment, what a
        phase on files knows.
        """
        losses = self._config.losses_of(self._phase.config)
        how = f"({'+'.join(loss.type for loss in losses.values())}, {self.seconds:.0f} s)"
        if self._final is not None:
            return (
                f"held-out reward: {self.state.rewards[-1]:.2f} -> {self._final.reward:.2f} {how}"
            )
        return f"{self._on_files.line(losses)} {how}"

    def _run_phase(self, stop: StopRequest) -> int:
        """Trains to the end of a phase (0), or until a signal has reached any process."""
        phase, config = self._phase, self._phase.config
        if len(self.state.rewards) == self.state.phase:  # false after a resumption within a phase
            evaluation = self._evaluate()
            reward = math.nan if evaluation is None else evaluation.reward
            self.state = replace(self.state, rewards=(*self.state.rewards, reward))
        self._on_files = FileSummary()
        for metrics in self._writer.logged(phase.name) if phase.steps_done else ():
            self._on_files.add(metrics)
        self._display.begin_phase(phase.name, config.steps, phase.steps_done)
        while phase.steps_done < config.steps:
            # One collective for both; a checkpoint that failed is raised by the next save.
            stops = _CANNOT_WRITE if self._saver.has_failed else stop.number
            stopped_by = self._context.processes.highest(stops)
            if stopped_by:
                return stopped_by
            self._step(phase)
            last = phase.steps_done == config.steps
            every = self._config.evaluation.every
            if every is not None and phase.steps_done % every == 0 and not last:
                self._evaluate()
            every = self._config.checkpoint.every
            if every is not None and phase.steps_done % every == 0 and not last:
                self._save()
        self._finish_step()
        reads_rewards = "advantages" in self._config.required_columns(phase.config)
        if reads_rewards and (warning := self._on_files.warning(phase.name)):
            self._display.message(warning)
        return 0

    def _step(self, phase: Phase) -> None:
        """Gives the device a step, then reads the numbers of the step before.

        So the device does not wait for packing, copies, log files and display.
        """
        self._context.processes.progress()
        if phase.source.uses_weights:
            self._finish_step()  # the sampler waits for the device anyway, and takes long
        earlier = None if self._unread is None else self._unread.result
        begin = time.monotonic()
        try:
            result = phase.step()
        finally:
            self._finish_step()
        self.state = replace(self.state, phase_step=phase.steps_done, step=self.state.step + 1)
        number = self.state.step
        self._unread = _UnreadStep(phase, phase.steps_done, number, begin, result, earlier)
        if not _runs_ahead(self._context.device):
            self._finish_step()

    def _finish_step(self) -> None:
        """Reads, checks and logs the numbers of the last step, if that is still to be done."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        phase, result = unread.phase, unread.result
        metrics = result.metrics
        seconds = None if unread.earlier is None else result.seconds_after(unread.earlier)
        if seconds is None:
            seconds = time.monotonic() - unread.begin
        self._check_finite(unread)
        self._on_files.add(metrics)
        metrics = {
            **metrics,
            "tokens_per_second": result.num_tokens / seconds,
            "seconds": self.seconds,
        }
        self._writer.log(unread.step, phase.name, metrics)
        self._display.step(metrics)
        if isinstance(phase.config, RLPhaseConfig):
            shows = (unread.phase_step - 1) % self._config.logging.samples_every == 0
            samples = result.samples[: self._config.logging.num_samples]
            if shows and samples:
                self._writer.log_samples(unread.step, phase.name, samples)
                self._display.samples(samples)

    def _check_finite(self, unread: _UnreadStep) -> None:
        result = unread.result
        bad = [name for name, value in result.metrics.items() if not math.isfinite(value)]
        problem = f"{', '.join(bad)} must be finite" if bad else ""
        bound = unread.phase.config.optimizer.max_skipped_updates
        if result.skipped_in_a_row > bound:
            problem = (
                f"grad_norm must be finite, was not in {result.skipped_in_a_row} updates one after "
                f"another (`optimizer.max_skipped_updates` is {bound})"
            )
        if problem:
            raise UserError(
                f"step {unread.step} (phase `{unread.phase.name}`): {problem}; the run ends "
                "here, its last checkpoint is as it was. Try a lower `optimizer.learning_rate` or "
                "`max_grad_norm`"
            )

    def _evaluate(self) -> Evaluation | None:
        self._finish_step()
        if self._context.environment is None:
            return None
        self._context.processes.progress()
        evaluation = evaluate(self._config, self._context)
        values = {**evaluation.metrics(), "seconds": self.seconds}
        self._writer.log(self.state.step, self._phase.name, values)
        self._display.evaluation(evaluation)
        return evaluation

    def _save(self) -> None:
        self._finish_step()
        place = (self.state.phase, self.state.phase_step)
        if place == self._saved_at:
            return
        self._context.processes.progress()
        self._folder.check()
        # Of the shards of all ranks, which then end together.
        if self._context.processes.any(not self._phase.has_finite_weights()):
            raise UserError(
                f"step {self.state.step} (phase `{self._phase.name}`): the weights must be finite, "
                "are not; they are not saved, and the last checkpoint is as it was. Try a lower "
                "`optimizer.learning_rate` or `max_grad_norm`"
            )
        state = self._phase.state(replace(self.state, seconds=self.seconds))
        self._writer.sync()
        self._saver.save(self._context.model.files(), state, self._context.tokenizer.files)
        self._saved_at = place
