"""Checkpoints of a run: Hugging Face folders, each with the state that a resumption needs.

    RUN/checkpoints/<phase>-<steps of the run>/   config.json, model.safetensors, the files of the
                                                  tokenizer, trainer/ (`trainer_state`) and
                                                  manifest.json (`manifest`)
    RUN/checkpoints/latest                        name of the last complete one

A folder appears under its name when it is complete and on the disk.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from fastrl.config import RunConfig, UserError, load_config
from fastrl.training.manifest import check_manifest, config_digest, is_of_config, write_manifest
from fastrl.training.trainer_state import TrainerState, is_format_1

CONFIG_FILE = "config.yaml"
CHECKPOINTS_FOLDER = "checkpoints"
LATEST_FILE = "latest"


class NewCheckpoint:
    """A checkpoint that is being written: a hidden folder until it is complete and on the disk.

    Args:
        run_dir: folder of the run.
        config: of the run.
        state: whose phase and step name it.
        files: contents of its files but those of tensors and the manifest, by path in the folder.
        say: takes messages about old checkpoints that cannot be removed.

    Attributes:
        folder: the checkpoint, under the name that it gets.
        temporary: where it is written.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        state: TrainerState,
        files: Mapping[str, bytes],
        say: Callable[[str], object],
    ) -> None:
        self._config = config
        self._digest = config_digest(config)
        self._files = files
        self._say = say
        name = f"{config.phase_name(state.phase)}-{state.step:06}"
        self.folder = run_dir / CHECKPOINTS_FOLDER / name
        self.temporary = self.folder.with_name(f".{name}.partial")

    def begin(self) -> None:
        """Makes the folder with all files but those of tensors.

        Raises:
            OSError: it cannot be written.
        """
        self.folder.parent.mkdir(exist_ok=True)
        _remove_partial(self.folder.parent, self._config, self._say)
        self.temporary.mkdir()
        for name, content in self._files.items():
            file = self.temporary / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)

    def finish(self) -> None:
        """Makes it the latest, and removes all but the last `checkpoint.keep`.

        Only folders that are checkpoints of this run, or were to become one, are removed.

        Raises:
            OSError: it cannot be written.
        """
        write_manifest(self.temporary, self._digest)
        sync_folder(self.temporary)
        folder = self.folder.parent
        if self.folder in _own_checkpoints(folder, self._config, self._digest):
            _remove(self.folder, self._say)  # left by a run that resumed before this step
        if self.folder.exists():
            raise FileExistsError(None, "the folder is there and not of this run; move it away")
        self.temporary.rename(self.folder)
        _write_latest(folder, self.folder.name)
        _remove_old(self.folder, self._config, self._digest, self._say)

    def failed(self, cause: str, *, cleans: bool) -> UserError:
        """The error of a checkpoint that cannot be written; a rank that `cleans` removes it."""
        if cleans:
            shutil.rmtree(self.temporary, ignore_errors=True)
        return UserError(
            f"{self.folder}: the checkpoint cannot be written: {cause}; the run ends here, and the "
            "checkpoints before are as they were"
        )


def _remove_old(target: Path, config: RunConfig, digest: str, say: Callable[[str], object]) -> None:
    """Removes all but the last `checkpoint.keep` checkpoints of the run, `target` among them."""
    own = _own_checkpoints(target.parent, config, digest)
    last = _step_of(target.name, config)
    assert last is not None
    own.pop(target, None)  # not there if its manifest cannot be read again
    # Those of later steps are of a run that resumed before them.
    others = sorted(((step <= last, step, path) for path, step in own.items()), reverse=True)
    for _, _, old in others[config.checkpoint.keep - 1 :]:
        try:
            _remove(old, say)
        except OSError as error:
            say(f"{old}: cannot be removed: {error.strerror or error}; remove it by hand")


def _remove(checkpoint: Path, say: Callable[[str], object]) -> None:
    """Removes a checkpoint, which loses its name first: half of one would be a foreign folder."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed.partial")
    checkpoint.rename(hidden)
    _remove_files(hidden, say)


def _remove_files(folder: Path, say: Callable[[str], object]) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        say(f"{folder}: cannot be removed: {error.strerror or error}; remove it by hand")


def latest_checkpoint(run_dir: Path) -> Path:
    """The folder of a run's latest checkpoint, whose files are what its manifest says.

    Args:
        run_dir: folder of the run, with its config.

    Raises:
        UserError: there is none, or it is damaged or of another config; the message names the
            one before that is whole.
    """
    folder = run_dir / CHECKPOINTS_FOLDER
    latest = folder / LATEST_FILE
    config = load_config(RunConfig, run_dir / CONFIG_FILE)
    name = _latest_name(folder, config)
    if name is None:
        raise UserError(
            f"{run_dir}: must be the folder of a run with a checkpoint, has no {latest}"
        )
    if _step_of(name, config) is None:
        raise UserError(
            f"{latest}: must be the name of a checkpoint beside it, such as "
            f"{config.phase_name(0)}-000010, is {name[:80]!r}"
        )
    digest = config_digest(config)
    try:
        _check(folder / name, digest)
    except UserError as error:
        whole = _whole_before(folder, name, config, digest)
        offer = "no checkpoint before it is whole"
        if whole is not None:
            offer = (
                f"{whole} before it is whole: to go on from that, move {name} away and write "
                f"{whole} into {latest}"
            )
        raise UserError(f"{error}\nthe latest checkpoint cannot be used; {offer}") from error
    return folder / name


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a run has a checkpoint, or says so, in the folder with its config."""
    config = load_config(RunConfig, run_dir / CONFIG_FILE)
    return _latest_name(run_dir / CHECKPOINTS_FOLDER, config) is not None


def is_last(checkpoint: Path, config: RunConfig) -> bool:
    """Whether a run's checkpoint is that of its end."""
    return _step_of(checkpoint.name, config) == sum(phase.steps for phase in config.phases)


def _latest_name(folder: Path, config: RunConfig) -> str | None:
    """What `latest` says or, before the first one was written, the last complete checkpoint."""
    latest = folder / LATEST_FILE
    if latest.is_file():
        return latest.read_text(encoding="utf-8", errors="replace").strip()
    own = _own_checkpoints(folder, config, config_digest(config)) if folder.is_dir() else {}
    return max(own, key=lambda path: own[path]).name if own else None


def named_checkpoint(run_dir: Path, name: str) -> Path:
    """The folder of a checkpoint of a run, whose files are what its manifest says.

    Args:
        run_dir: folder of the run, with its config.
        name: of the checkpoint's folder, such as "rl-000040".

    Raises:
        UserError: the run has no such checkpoint, or it is damaged or of another config.
    """
    config = load_config(RunConfig, run_dir / CONFIG_FILE)
    folder, digest = run_dir / CHECKPOINTS_FOLDER, config_digest(config)
    if _step_of(name, config) is None or not (folder / name).is_dir():
        own = _own_checkpoints(folder, config, digest) if folder.is_dir() else {}
        known = ", ".join(path.name for path in sorted(own, key=own.__getitem__)) or "none"
        raise UserError(f"{run_dir}: has no checkpoint {name[:80]!r}; its checkpoints are: {known}")
    _check(folder / name, digest)
    return folder / name


def _check(checkpoint: Path, digest: str) -> None:
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: must be the folder of a checkpoint, is none")
    if not is_format_1(checkpoint):
        check_manifest(checkpoint, digest)


def _whole_before(folder: Path, name: str, config: RunConfig, digest: str) -> str | None:
    """The newest checkpoint of an earlier step that passes its check."""
    last = _step_of(name, config) or 0
    own = _own_checkpoints(folder, config, digest)
    for step, path in sorted(((step, path) for path, step in own.items()), reverse=True):
        if step < last:
            try:
                _check(path, digest)
            except UserError:
                continue
            return path.name
    return None


def _step_of(name: str, config: RunConfig) -> int | None:
    """The steps in the name of a checkpoint of the config's phases; None for another name."""
    prefix, _, step = name.rpartition("-")
    names = [config.phase_name(index) for index in range(len(config.phases))]
    return int(step) if prefix in names and re.fullmatch("[0-9]{6,15}", step) else None


def _own_checkpoints(folder: Path, config: RunConfig, digest: str) -> dict[Path, int]:
    """The steps of the run's checkpoints in a folder, whole or not."""
    own: dict[Path, int] = {}
    for path in folder.iterdir():
        step = _step_of(path.name, config)
        if step is None or path.is_symlink():
            continue
        if is_of_config(path, digest) or is_format_1(path):
            own[path] = step
    return own


def _remove_partial(folder: Path, config: RunConfig, say: Callable[[str], object]) -> None:
    """Removes what a run that was killed left half-written, or half-removed."""
    for path in folder.glob(".*.partial*"):
        name = path.name.removeprefix(".").removesuffix(".tmp").removesuffix(".partial")
        is_own = _step_of(name.removesuffix(".removed"), config) is not None
        if path.is_dir() and not path.is_symlink() and is_own:
            _remove_files(path, say)


def _write_latest(folder: Path, name: str) -> None:
    latest = folder / f".{LATEST_FILE}.partial"
    latest.write_text(f"{name}\n", encoding="utf-8")
    sync_one(latest)
    sync_one(folder)  # the checkpoint's name before the one that points to it
    latest.replace(folder / LATEST_FILE)
    sync_one(folder)
    sync_one(folder.parent)


def sync_folder(folder: Path) -> None:
    """Puts the files of a folder, and then the folders, on the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_one(Path(parent) / name)
        sync_one(Path(parent))


def sync_one(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
