"""The whole surface as one tree of texts and numbers, and the file that it is stored in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastrl.config import LanguageModelHeadConfig, RunConfig
from tests.surface import formats, interface, numbers

FILE = Path(__file__).parent / "surface.json"

SECTIONS = (
    *("names", "commands", "outcomes", "config keys", "schemas", "rollout files"),
    *("heads", "losses", "run"),
)


def section(name: str, folder: Path) -> Any:
    """One part of the surface; `folder` is an empty one for its files."""
    schemas = {
        kind.__name__: kind.model_json_schema() for kind in (RunConfig, LanguageModelHeadConfig)
    }
    makers: dict[str, Any] = {
        "names": interface.public_names,
        "commands": interface.command_line,
        "outcomes": lambda: interface.outcomes(folder),
        "config keys": lambda: {kind: formats.config_keys(x) for kind, x in schemas.items()},
        "schemas": lambda: {kind: formats.schema_digest(x) for kind, x in schemas.items()},
        "rollout files": lambda: formats.rollout_files(folder),
        "heads": numbers.heads,
        "losses": numbers.losses,
        "run": lambda: numbers.run(folder),
    }
    return makers[name]()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every text and number of a tree, by its path."""
    if isinstance(value, dict | list | tuple):
        if not isinstance(value, dict):
            value = {f"[{number:03}]": child for number, child in enumerate(value)}
        for key, child in value.items():
            yield from leaves(child, f"{path} / {key}" if path else str(key))
    else:
        yield path, value


def stored() -> dict[str, Any]:
    """The surface as it is frozen."""
    record: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return record


def store(folder: Path) -> None:
    """Freezes the surface as it is now."""
    record: dict[str, Any] = {"machine": numbers.machine()}
    for name in SECTIONS:
        (folder / name).mkdir()
        record[name] = section(name, folder / name)
    FILE.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
