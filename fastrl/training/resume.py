"""How a run starts: anew, or from the latest checkpoint of its folder.

Here is what decides it, what must be as it was, and the state to go on with. What a checkpoint's
files must be is in `checkpoint.py` and `trainer_state.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastrl.config import RunConfig, UserError, load_config
from fastrl.training.checkpoint import CONFIG_FILE, has_checkpoint, is_last, latest_checkpoint
from fastrl.training.context import RunContext
from fastrl.training.manifest import MAY_CHANGE, determining_values
from fastrl.training.rollouts import RolloutSource
from fastrl.training.run_folder import LOCK_FILE
from fastrl.training.trainer_state import TrainerState, read_trainer_state

_SHOWN_KEYS = 5


@dataclass(frozen=True)
class Start:
    """How a run starts.

    Attributes:
        checkpoint: that it goes on from, whose files are what its manifest says; None to begin.
        is_finished: whether that is the end of the run.
        begins_again: whether the folder is that of a run that ended before its first checkpoint.
    """

    checkpoint: Path | None = None
    is_finished: bool = False
    begins_again: bool = False


def find_start(config: RunConfig, run_dir: Path, *, resume: bool) -> Start:
    """How a run in a folder starts; nothing is written.

    Args:
        config: of the run.
        run_dir: its folder, which may be missing.
        resume: whether it goes on if there is a checkpoint; otherwise the folder must be empty.

    Raises:
        UserError: a folder that is in use; with `resume`, a folder of something else or of a run
            with another config, or a checkpoint that cannot be used.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir}: must be a folder, is a file")
    if not resume:
        if run_dir.is_dir() and any(path.name != LOCK_FILE for path in run_dir.iterdir()):
            raise UserError(
                f"{run_dir}: must be new or empty; choose another --run-dir, remove it, or go on "
                "with the run in it with --resume"
            )
        return Start()
    if not (run_dir / CONFIG_FILE).exists():
        _check_no_other_files(run_dir)
        return Start()
    _check_same(load_config(RunConfig, run_dir / CONFIG_FILE), config, run_dir)
    if not has_checkpoint(run_dir):
        return Start(begins_again=True)
    checkpoint = latest_checkpoint(run_dir)
    return Start(checkpoint, is_finished=is_last(checkpoint, config))


def state_to_resume(config: RunConfig, checkpoint: Path, context: RunContext) -> TrainerState:
    """The state of a checkpoint, moved to the next phase if its own has ended.

    Raises:
        UserError: as `read_trainer_state`; another tokenizer than the run began with.
    """
    state = read_trainer_state(checkpoint, config, context.model.module)
    if config.tokenizer.type == "file":
        _check_tokenizer(checkpoint, config.tokenizer.path, context.tokenizer.files)
    has_ended = state.phase_step == config.phases[state.phase].steps
    if not has_ended or state.phase + 1 == len(config.phases):
        return state
    return replace(
        state,
        phase=state.phase + 1,
        phase_step=0,
        position=0,
        optimizer=None,
        skipped_in_a_row=0,
    )


def with_inputs(
    state: TrainerState,
    context: RunContext,
    sources: Mapping[int, RolloutSource],
    run_dir: Path,
) -> TrainerState:
    """The state with digests of the run's problems and of the rollout files still to be read.

    All processes must call.

    Raises:
        UserError: others than the run began with, or others on another process.
    """
    digests = {path: sha for source in sources.values() for path, sha in source.digests.items()}
    for other in context.processes.gather(digests):
        _check_files(other, digests, "must be the same on all processes, is not")
    known = {path: state.files.get(path, sha) for path, sha in digests.items()}
    changed = "must be as it was when the run began, but has other content"
    _check_files(known, digests, f"{changed}, so {run_dir} cannot go on with it; put the old back")
    if context.environment is None:
        return replace(state, files=digests)
    if state.problems not in ("", context.environment.digest):
        raise UserError(
            f"{run_dir}: a run goes on with the problems it began with, but `environment` gives "
            "others now: held-out ones may be among those that were trained on; the problems must "
            "follow from `seed` and `environment` alone"
        )
    return replace(state, files=digests, problems=context.environment.digest)


def _check_files(wanted: Mapping[str, str], found: Mapping[str, str], requirement: str) -> None:
    for path, digest in found.items():
        if wanted[path] != digest:
            raise UserError(
                f"{path}: the rollout file {requirement} (SHA-256 {wanted[path][:12]}..., got "
                f"{digest[:12]}...)"
            )


def _check_tokenizer(checkpoint: Path, path: str, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        kept = checkpoint / name
        if kept.exists() and kept.read_bytes() != content:
            raise UserError(
                f"{path}: the tokenizer must be as it was when the run began, but gives another "
                f"{name} than {checkpoint} has; put the old one back"
            )


def _check_no_other_files(run_dir: Path) -> None:
    """Refuses a folder with files that no run leaves before its config is there."""
    names = [path.name for path in run_dir.iterdir()] if run_dir.is_dir() else []
    others = [name for name in names if not name.startswith(".") and name != f"{CONFIG_FILE}.tmp"]
    if others:
        raise UserError(
            f"{run_dir}: must be the folder of a run, or new or empty, but has {min(others)} and "
            f"no {CONFIG_FILE}; choose another --run-dir"
        )


def _check_same(before: RunConfig, now: RunConfig, run_dir: Path) -> None:
    """Refuses another config in what determines the result; the message has the first keys."""
    old, new = (_flat(determining_values(config)) for config in (before, now))
    differing = [
        f"  `{key}`: {_shown(old, key)} there, {_shown(new, key)} now"
        for key in dict.fromkeys([*old, *new])
        if _shown(old, key) != _shown(new, key)
    ]
    if differing:
        more = len(differing) - _SHOWN_KEYS
        listed = differing[:_SHOWN_KEYS] + ([f"  and {more} more"] if more > 0 else [])
        others = ", ".join(f"`{key}`" for key in MAY_CHANGE[RunConfig])
        raise UserError(
            f"{run_dir}: a run goes on with the config it began with, which is {CONFIG_FILE} there;"
            f" only {others} (and where servers are) may be others, but these differ:\n"
            + "\n".join(listed)
        )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "nothing"


def _flat(value: Any, above: str = "") -> dict[str, Any]:
    """The values of a tree of mappings and lists by their key paths."""
    if not isinstance(value, dict | list) or not value:
        return {above: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flat(item, f"{above}.{key}" if above else f"{key}")
    return flat
