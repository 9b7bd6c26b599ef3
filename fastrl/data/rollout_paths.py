"""Which rollout files a list of paths means: files, folders and patterns."""

from __future__ import annotations

from collections.abc import Iterable
from glob import glob, has_magic
from pathlib import Path

from fastrl.config.base import UserError
from fastrl.data.rollouts import SUFFIXES


def rollout_files(paths: Iterable[str]) -> dict[str, str]:
    """The rollout files of paths, each with the path that means it.

    They are in the order of the paths, and by name within each.

    Args:
        paths: files; folders, whose rollout files are meant, without those of their folders;
            patterns such as `runs/*/rollouts-*.jsonl.gz`, in which `**` is any depth. What exists
            under a path's very name is no pattern.

    Raises:
        UserError: a folder or pattern without rollout files, or a file that two paths mean.
    """
    found: dict[Path, tuple[str, str]] = {}
    for path in paths:
        for file in _files_of(path):
            place = Path(file).resolve()
            if place in found:
                _, first = found[place]
                raise UserError(
                    f"{file}: must be meant by one path, but is by `{first}` and `{path}`; its "
                    "documents would count twice"
                )
            found[place] = (file, path)
    return dict(found.values())


def _files_of(path: str) -> list[str]:
    if Path(path).is_dir():
        files = [str(file) for file in Path(path).iterdir()]
    elif has_magic(path) and not Path(path).exists():
        files = glob(path, recursive=True)
    else:
        return [path]
    named = [file for file in files if file.endswith(SUFFIXES) and Path(file).is_file()]
    shown = sorted(file for file in named if not Path(file).name.startswith("."))
    if not shown:
        raise UserError(f"{path}: no rollout files there, whose names end in {', '.join(SUFFIXES)}")
    return shown
