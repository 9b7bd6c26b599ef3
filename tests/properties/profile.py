"""How properties are tried: the same examples each time, none kept on the disk."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SUPPRESSED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def examples(number: int) -> settings:
    """So many examples of a property."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=SUPPRESSED,
    )
