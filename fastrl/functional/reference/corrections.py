"""The definition of a correction of a policy-gradient loss: plain loops over documents and tokens.

Only tests and benchmarks import it, as `losses.py` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.functional.reference.tokens import BOUND


def correction_weight(
    entry: Mapping[str, Any],
    policy: Sequence[float],
    behaviour: Sequence[float],
    by_document: Sequence[Sequence[int]],
    t: int,
    advantage: float,
) -> float:
    """The factor of token t.

    Args:
        entry: fields of the correction.
        policy: log-probabilities under the wanted policy.
        behaviour: the same under the policy of the tokens.
        by_document: labelled slots of each document of the micro-batch.
        t: a labelled slot.
        advantage: of the token.
    """
    if entry["advantage"] == "negative" and advantage >= 0:
        return 1.0
    if entry["advantage"] == "positive" and advantage <= 0:
        return 1.0
    if entry["level"] == "batch":
        slots = [s for document in by_document for s in document]
        kept = sorted(slots, key=lambda s: token_statistic(entry, policy[s], behaviour[s]))
        while kept:
            found = [token_statistic(entry, policy[s], behaviour[s]) for s in kept]
            if sum(found) / len(found) <= entry["high"]:
                break
            kept.pop()
        return 1.0 if t in kept else 0.0
    if entry["level"] == "token":
        statistic = token_statistic(entry, policy[t], behaviour[t])
        return bounded(entry, statistic)
    (slots,) = [list(document) for document in by_document if t in document]
    statistics = [token_statistic(entry, policy[s], behaviour[s]) for s in slots]
    if entry["aggregate"] == "any":
        return min(bounded(entry, statistic) for statistic in statistics)
    if entry["statistic"] == "ratio":
        log_ratio = sum(policy[s] - behaviour[s] for s in slots)
        if entry["aggregate"] == "mean":
            log_ratio /= len(slots)
        return bounded(entry, math.exp(min(max(log_ratio, -BOUND), BOUND)))
    total = sum(statistics)
    return bounded(entry, total / len(slots) if entry["aggregate"] == "mean" else total)


def token_statistic(entry: Mapping[str, Any], policy: float, behaviour: float) -> float:
    """The statistic of one token."""
    log_ratio = policy - behaviour
    if entry["statistic"] == "k1":
        return -log_ratio
    if entry["statistic"] == "k2":
        return log_ratio * log_ratio / 2
    if entry["statistic"] == "probability_difference":
        return abs(math.exp(policy) - math.exp(behaviour))
    log_ratio = min(max(log_ratio, -BOUND), BOUND)
    if entry["statistic"] == "k3":
        return math.exp(log_ratio) - 1 - log_ratio
    return math.exp(log_ratio)


def bounded(entry: Mapping[str, Any], statistic: float) -> float:
    """The factor of a statistic."""
    low = -math.inf if entry["low"] is None else entry["low"]
    high = math.inf if entry["high"] is None else entry["high"]
    if entry["mode"] == "truncate":
        return min(max(statistic, low), high)
    if not low <= statistic <= high:
        return 0.0
    return statistic if entry["mode"] == "mask" else 1.0
