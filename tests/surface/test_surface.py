"""What users see does not change: names, commands, keys, columns, metrics, numbers.

The stored surface is surface.json; `python -m tests.surface` writes it anew, and its diff is then
what a change means to users. Nothing here imports what may move without their notice.

Texts are equal everywhere. Sums on a CPU differ in their last digits between processors and builds
of torch, so numbers and digests of tensors are compared to the last digit only where torch, CPU
capability and processor are those that the file names. Elsewhere numbers must agree within 1e-9 of
themselves (fp32: 1e-5), also the norms that stand beside digests, and digests of tensors are left
out. The problems of the run come from reasoning-gym: with another version of it, only the names of
what the run writes are compared.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.surface import numbers
from tests.surface.record import SECTIONS, leaves, section, stored

# A metric that is 0 but for rounding may differ by more than its own size.
_FLOOR = 1e-3

_ITEM = r" / \[\d{3}\]"


def _may_differ(path: str, expected: Any, got: Any) -> bool:
    """Whether another machine may give `got` for `expected`."""
    if path.endswith("/ sha256"):
        return True
    if not isinstance(expected, float) or not isinstance(got, float):
        return False
    # Old and sampler's log-probabilities are fp32 in the batches of a run, and so are their ratios.
    is_fp32 = "fp32" in path or ("policy/" in path and "rollout" in path)
    tolerance = 1e-5 if is_fp32 else 1e-9
    return math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance * _FLOOR)


def _lines(tree: dict[str, Any]) -> list[str]:
    """The tree line by line; items of a list keep their order and go without their numbers."""
    return [f"{re.sub(_ITEM, '', path)}: {value!r}" for path, value in sorted(tree.items())]


def changes(name: str, expected: Any, got: Any, there: dict[str, str]) -> list[str]:
    """The diff of a section, stored on the machine `there` and made on this one."""
    here = numbers.machine()
    old, new = dict(leaves(expected)), dict(leaves(got))
    if name == "run" and here["reasoning-gym"] != there["reasoning-gym"]:
        old, new = dict.fromkeys(old), dict.fromkeys(new)
    if any(here[key] != there[key] for key in ("torch", "cpu capability", "processor")):
        new |= {
            path: old[path]
            for path, value in new.items()
            if path in old and _may_differ(path, old[path], value)
        }
    return list(difflib.unified_diff(_lines(old), _lines(new), "stored", "now", n=0, lineterm=""))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_surface_is_the_stored_one(name: str, tmp_path: Path) -> None:
    record = stored()
    diff = changes(name, record[name], section(name, tmp_path), record["machine"])
    if diff:
        pytest.fail(f"`{name}` changed for users:\n" + "\n".join(diff), pytrace=False)


def test_another_machine_may_differ_in_the_last_digits_only() -> None:
    there = numbers.machine() | {"processor": "another"}
    digest = {"sha256": "a", "norm": 1.0}
    old = {"x": {"loss": 1.0, "tokens": 3, "gradient": digest}}
    near = {"x": {"loss": 1 + 1e-12, "tokens": 3, "gradient": digest | {"sha256": "b"}}}
    assert changes("heads", old, near, there) == []
    assert len(changes("heads", old, near, numbers.machine())) > 0
    for far in ({"loss": 1 + 1e-7}, {"tokens": 4}, {"gradient": digest | {"norm": 1.1}}, {"y": 1}):
        assert changes("heads", old, {"x": old["x"] | far}, there) != []
