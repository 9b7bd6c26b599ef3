"""Compares constraints.txt with a copy of PyPA's advisory database, without any network.

    git clone --depth 1 https://github.com/pypa/advisory-database
    python -m tests.audit advisory-database

Where the network is there, pip-audit asks for what is known today (CONTRIBUTING.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"


def main(arguments: list[str] | None = None) -> int:
    """Prints the advisories of the pinned versions; 1 if there are any, or nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("database", type=Path, help="folder with `vulns`")
    parser.add_argument("--constraints", type=Path, default=CONSTRAINTS)
    options = parser.parse_args(arguments)
    files = list((options.database / "vulns").glob("*/*.yaml"))
    if not files:
        print(f"{options.database}: must hold PyPA's advisory database, has no vulns/*/*.yaml")
        return 1
    versions = pinned(options.constraints)
    found, newest = [], ""
    for file in files:
        if canonicalize_name(file.parent.name) not in versions:
            continue
        advisory = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        newest = max(newest, advisory.get("modified", ""))
        found += list(affected(advisory, versions))
    print("\n".join(found))
    print(
        f"{len(found)} advisories for {len(versions)} versions; the latest about any of these"
        f" packages is of {newest[:10] or 'no day'}"
    )
    return int(bool(found))


def pinned(constraints: Path) -> dict[str, set[Version]]:
    """The versions that a constraints file names: pins, and the bounds that a range includes."""
    versions: dict[str, set[Version]] = {}
    for line in constraints.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        bounds = [each for each in requirement.specifier if "=" in each.operator]
        versions.setdefault(name, set()).update(Version(each.version) for each in bounds)
    return versions


def affected(advisory: dict[str, Any], versions: dict[str, set[Version]]) -> Iterator[str]:
    """A line for each version that an advisory is about."""
    if "withdrawn" in advisory:
        return
    for entry in advisory["affected"]:
        name = canonicalize_name(entry["package"]["name"])
        for version in sorted(versions.get(name, ())):
            if is_listed(version, entry) or any(
                is_between(version, each["events"])
                for each in entry.get("ranges", ())
                if each["type"] == "ECOSYSTEM"
            ):
                names = ", ".join([advisory["id"], *advisory.get("aliases", ())])
                yield f"{name} {version}: {names}"


def is_listed(version: Version, entry: dict[str, Any]) -> bool:
    """Whether the entry names the version."""
    return any(_version(each) == version for each in entry.get("versions", ()))


def is_between(version: Version, events: list[dict[str, str]]) -> bool:
    """Whether the version lies in a range of the OSV schema: its events are in order."""
    is_in = False
    for event in events:
        ((kind, text),) = event.items()
        at = _version(text)
        if at is None:
            continue
        if kind == "introduced":
            is_in = is_in or version >= at
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            is_in = False
    return is_in


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


if __name__ == "__main__":
    sys.exit(main())
