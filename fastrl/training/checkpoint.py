"""Checkpoints of a run: Hugging Face folders, each with the state that a resumption needs.

    RUN/checkpoints/<phase>-<steps of the run>/   config.json, model.safetensors, the files of the
                                                  tokenizer, trainer/ (`trainer_state`)
    RUN/checkpoints/latest                        name of the last complete one

A folder appears under its name when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from fastrl.config.base import UserError
from fastrl.models.checkpoint import save_llama
from fastrl.models.llama import Llama
from fastrl.training.trainer_state import TrainerState, write_trainer_state

CHECKPOINTS_FOLDER = "checkpoints"
LATEST_FILE = "latest"


def save_checkpoint(
    run_dir: Path,
    phase_name: str,
    llama: Llama,
    state: TrainerState,
    *,
    files: Mapping[str, bytes],
    keep: int,
    writes: bool = True,
) -> Path:
    """Writes a checkpoint, makes it the latest and removes all but the last `keep`.

    Args:
        run_dir: folder of the run.
        phase_name: prefix of the checkpoint's name.
        llama: all ranks of a sharded model must call it.
        state: with whole tensors.
        files: contents of further files by name, those of the tokenizer.
        keep: number of checkpoints that are kept.
        writes: whether this rank writes; the others only contribute their shards.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: it cannot be written; nothing is left of it.
    """
    folder = run_dir / CHECKPOINTS_FOLDER
    target = folder / f"{phase_name}-{state.step:06}"
    temporary = folder / f".{target.name}.partial"
    if not writes:
        save_llama(llama, temporary, writes=False)
        return target
    for stale in (temporary, target):
        if stale.exists():  # left by a run that was killed, or that resumed before this step
            shutil.rmtree(stale)
    try:
        save_llama(llama, temporary)
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        write_trainer_state(state, temporary)
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"{target}: the checkpoint cannot be written: {error.strerror or error}; the run ends "
            "here, and the checkpoints before are as they were"
        ) from error
    latest = folder / f".{LATEST_FILE}.partial"
    latest.write_text(f"{target.name}\n", encoding="utf-8")
    latest.replace(folder / LATEST_FILE)
    others = [path for path in folder.iterdir() if path.is_dir() and path != target]
    others.sort(key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for old in others[keep - 1 :]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(run_dir: Path) -> Path:
    """The folder of a run's latest checkpoint.

    Raises:
        UserError: there is none.
    """
    latest = run_dir / CHECKPOINTS_FOLDER / LATEST_FILE
    if not latest.is_file():
        raise UserError(
            f"{run_dir}: must be the folder of a run with a checkpoint, has no {latest}"
        )
    return latest.parent / latest.read_text(encoding="utf-8").strip()
