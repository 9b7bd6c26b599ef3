"""The manifest of a checkpoint: size and SHA-256 of every file, and a digest of the config.

It finds damage, not forgery: whoever writes a checkpoint writes its manifest too.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fastrl.config import RunConfig, UserError, parse_config
from fastrl.config.base import Config
from fastrl.config.rollouts import ServerRolloutsConfig
from fastrl.models.checkpoint import read_json

MANIFEST_FILE = "manifest.json"

MAY_CHANGE: dict[type[Config], tuple[str, ...]] = {
    RunConfig: ("parallel", "device", "checkpoint", "logging"),
    ServerRolloutsConfig: ("urls", "weights", "model", "max_in_flight", "timeout", "retries"),
}
"""What may be another when a run goes on: it does not determine the result."""


class _File(Config):
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Manifest(Config):
    """What manifest.json must be."""

    format: Literal[2]
    config: str
    files: dict[str, _File]


def write_manifest(checkpoint: Path, digest: str) -> None:
    """Writes the manifest of a folder whose other files are all there.

    Args:
        checkpoint: the folder.
        digest: of the config.

    Raises:
        OSError: a file cannot be read or written.
    """
    files = {name: _entry(checkpoint / name) for name in _listed(checkpoint)}
    text = json.dumps({"format": 2, "config": digest, "files": files}, indent=2)
    (checkpoint / MANIFEST_FILE).write_text(f"{text}\n", encoding="utf-8")


def check_manifest(checkpoint: Path, digest: str | None = None) -> None:
    """Refuses a folder that is not what its manifest says.

    Args:
        checkpoint: the folder.
        digest: of the config that it must be of; None for any.

    Raises:
        UserError: a file that is missing, unlisted, or of another size or SHA-256; a manifest that
            is missing or malformed; another config.
    """
    source = checkpoint / MANIFEST_FILE
    manifest = parse_config(_Manifest, read_json(source), source=str(source))
    found = _listed(checkpoint)
    for name, wanted in manifest.files.items():
        file = checkpoint / name
        if name not in found:
            raise UserError(f"{file}: must be there, as {MANIFEST_FILE} says, is not")
        size = file.stat().st_size
        if size != wanted.size:
            raise UserError(
                f"{file}: must have {wanted.size:,} bytes, as {MANIFEST_FILE} says, has {size:,}"
            )
        sha256 = _entry(file)["sha256"]
        if sha256 != wanted.sha256:
            raise UserError(
                f"{file}: must have SHA-256 {wanted.sha256}, as {MANIFEST_FILE} says, has {sha256}"
            )
    unlisted = [name for name in found if name not in manifest.files]
    if unlisted:
        raise UserError(
            f"{checkpoint / unlisted[0]}: must be in {MANIFEST_FILE}, is not; move what does not "
            "belong to the checkpoint out of its folder"
        )
    if digest not in (None, manifest.config):
        raise UserError(
            f"{source}: must be of the run's config, whose digest is {digest}, is of another, "
            f"{manifest.config}"
        )


def is_of_config(checkpoint: Path, digest: str) -> bool:
    """Whether a folder has a manifest of this config; its files are not looked at."""
    try:
        return bool(read_json(checkpoint / MANIFEST_FILE).get("config") == digest)
    except UserError:
        return False


def config_digest(config: RunConfig) -> str:
    """SHA-256 of what determines the result of a run.

    Defaults are left out, so that keys that a later version adds change nothing.
    """
    values = determining_values(config, with_defaults=False)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def determining_values(value: Any, *, with_defaults: bool = True) -> Any:
    """The values of a config, as JSON has them, without those that may change."""
    if isinstance(value, Config):
        values = dict(value)
        fields = type(value).model_fields.items()
        defaults = {
            name: field.get_default(call_default_factory=True, validated_data=values)
            for name, field in fields
        }
        return {
            name: determining_values(item, with_defaults=with_defaults)
            for name, item in values.items()
            if name not in MAY_CHANGE.get(type(value), ())
            and (with_defaults or name == "type" or item != defaults[name])
        }
    if isinstance(value, dict):
        return {
            str(key): determining_values(item, with_defaults=with_defaults)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [determining_values(item, with_defaults=with_defaults) for item in value]
    return value if isinstance(value, bool | int | float | None) else str(value)


def _listed(checkpoint: Path) -> list[str]:
    """The files of a folder and its folders, without hidden ones and the manifest."""
    paths = [path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file()]
    shown = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    return sorted(path.as_posix() for path in shown if path.as_posix() != MANIFEST_FILE)


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"size": os.fstat(opened.fileno()).st_size, "sha256": sha256}
