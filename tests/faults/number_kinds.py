"""What happens to numbers: gradients, weights and losses that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fastrl.training import llama_model, phases
from tests.faults.kinds import Case, Kind, saved_before
from tests.faults.places import STEPS, Place


def _spoil(tensor: torch.Tensor, value: float) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        local.view(-1)[0] = value


def _spoil_in_update(number: int, value: float, what: str) -> None:
    """Spoils a gradient before the sum over ranks, or a weight after the n-th update, from 1."""
    places = {"gradient": (llama_model, "reduce_gradients"), "weight": (phases, "apply_update")}
    module, name = places[what]
    function: Callable[..., Any] = getattr(module, name)
    calls = 0

    def spoiling(owner: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and what == "gradient":
            _spoil(next(owner.parameters()).grad, value)
        result = function(owner, *arguments)
        if calls == number and what == "weight":
            _spoil(owner.param_groups[0]["params"][0], value)
        return result

    setattr(module, name, spoiling)


def _on(rank: int, number: int, value: float, what: str) -> Any:
    return lambda this: _spoil_in_update(number, value, what) if this == rank else None


def _is_left_out(place: Place, number: int, value: float, rank: int) -> None:
    ended = place.train(_on(rank, number, value, "gradient"))
    assert ended.codes == [0] * place.num_ranks, ended.err
    skipped = [record["skipped_updates"] for record in place.metrics()]
    assert skipped == [float(step == number) for step in range(1, STEPS + 1)], skipped
    records = [record for record in place.metrics() if "loss" in record]
    assert all(math.isfinite(record["loss"]) for record in records)


def _ends(place: Place, number: int, value: float, rank: int) -> None:
    bound = "phases.{}.optimizer.max_skipped_updates=0"
    overrides = [bound.format(index) for index in (0, 1)]
    ended = place.train(_on(rank, number, value, "gradient"), *overrides)
    place.is_refused(ended, f"step {number} (phase", "grad_norm must be finite")
    assert place.saved == saved_before("step", number)
    place.goes_on(*overrides)


def _is_never_saved(place: Place, number: int, value: float, rank: int) -> None:
    ended = place.train(_on(rank, number, value, "weight"))
    place.is_refused(ended, "must be finite")
    assert place.saved == saved_before("step", number)
    place.goes_on()


def _cases(flow: Any) -> list[Case]:
    return [
        Case(ranks, partial(flow, number=number, value=value, rank=ranks - 1))
        for ranks, numbers in ((1, range(1, STEPS + 1)), (2, (2, 4)), (4, (5,)))
        for number in numbers
        for value in (math.nan, math.inf)
    ]


KINDS = [
    Kind(
        "a gradient of a rank that is not finite",
        "0; all ranks leave out that update, and count it",
        "that update",
        _cases(_is_left_out),
    ),
    Kind(
        "more such gradients than `max_skipped_updates`",
        "2 and one message on each rank",
        "the steps after the last checkpoint",
        _cases(_ends),
    ),
    Kind(
        "a weight of a rank that becomes not finite",
        "2 and one message on each rank; it is never saved",
        "the steps after the last checkpoint",
        _cases(_is_never_saved),
    ),
]
