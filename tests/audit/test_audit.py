"""The comparison of pins with advisories finds what is affected, and fails where it cannot look."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.__main__ import CONSTRAINTS, main, pinned

ADVISORY = """
id: PYSEC-1
affected:
- package: {name: Some.Package, ecosystem: PyPI}
  ranges:
  - type: GIT
    events: [{introduced: "0"}, {fixed: abc}]
  - type: ECOSYSTEM
    events: [{introduced: "0"}, {fixed: "1.10"}, {introduced: "2.0"}, {last_affected: "2.3"}]
  versions: ["3.1"]
aliases: [CVE-1]
modified: "2026-01-02T00:00:00Z"
"""


def audit(folder: Path, constraints: str, advisory: str = ADVISORY) -> int:
    (folder / "vulns" / "some-package").mkdir(parents=True, exist_ok=True)
    path = folder / "vulns" / "some-package" / "PYSEC-1.yaml"
    path.write_text(advisory, encoding="utf-8")
    (folder / "pins.txt").write_text(constraints, encoding="utf-8")
    return main([str(folder), "--constraints", str(folder / "pins.txt")])


@pytest.mark.parametrize(
    ("version", "code"),
    [("1.9", 1), ("1.10", 0), ("1.11", 0), ("2.0", 1), ("2.3", 1), ("2.3.1", 0), ("3.1", 1)],
)
def test_a_version_in_a_range_or_list_is_affected(
    tmp_path: Path, version: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(tmp_path, f"# pins\nsome_package=={version}  # why\nother==1.0\n") == code
    out = capsys.readouterr().out
    assert (f"some-package {version}: PYSEC-1, CVE-1" in out) == bool(code)
    assert f"{code} advisories for 2 versions; the latest about any of these packages is of" in out


def test_the_bounds_of_a_range_are_compared(tmp_path: Path) -> None:
    assert audit(tmp_path, "some-package>=1.10,<=2.1\n") == 1
    assert audit(tmp_path, "some-package>=1.10,<2.0\n") == 0


def test_what_was_withdrawn_is_left_out(tmp_path: Path) -> None:
    assert audit(tmp_path, "some-package==1.9\n", ADVISORY + 'withdrawn: "2026-01-03"\n') == 0


def test_no_database_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "must hold PyPA's advisory database" in capsys.readouterr().out


def test_every_constraint_is_compared() -> None:
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "=" in line]
    versions = pinned(CONSTRAINTS)
    assert len(versions) >= 90
    assert len(versions) == sum(not line.startswith("#") for line in lines)
    assert all(versions.values())
