"""What the head runs on every layout of ranks: each loss in each strategy, and options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from fastrl.config import CrossEntropyLossConfig, GRPOLossConfig, GSPOLossConfig
from tests.helpers.layouts import Ranks
from tests.helpers.sharded_head import HeadRun, WholeResult

TOLERANCE = 1e-10
GRPO = GRPOLossConfig(epsilon_low=0.1, epsilon_high=0.2)
GSPO = GSPOLossConfig(epsilon_low=0.05, epsilon_high=0.1)
CROSS_ENTROPY = CrossEntropyLossConfig()
# A loss that is added here runs on every layout.
LOSSES = {"grpo": GRPO, "gspo": GSPO, "cross_entropy": CROSS_ENTROPY}
STRATEGIES: tuple[Literal["recompute", "single_pass"], ...] = ("recompute", "single_pass")
RUNS = {
    **{
        # Several chunks; twelve rows hold the longest document.
        f"{name}-{strategy}": HeadRun(
            ((name, loss),), strategy, chunk_size=12 if name == "gspo" else 4
        )
        for name, loss in LOSSES.items()
        for strategy in STRATEGIES
    },
    "grpo-micro_batches": HeadRun((("grpo", GRPO),), micro_batches=2, temperature=True),
    "gspo-micro_batches": HeadRun((("gspo", GSPO),), micro_batches=2, temperature=True),
    "grpo-dropping_clipped_rows": HeadRun(
        (("grpo", GRPO),), "recompute", chunk_size=4, drop_inactive_rows=True
    ),
    "grpo-recorded_sets": HeadRun((("grpo", GRPO),), "recompute", main_grad=True, recorded_every=1),
    "gspo-some_recorded_sets": HeadRun(
        (("gspo", GSPO),), "recompute", main_grad=True, recorded_every=2
    ),
    "all-without_metrics": HeadRun(tuple(LOSSES.items()), metrics=False, bias=False),
}
FEW_RUNS = (
    "grpo-single_pass",
    "grpo-dropping_clipped_rows",
    "gspo-recompute",
    "gspo-some_recorded_sets",
    "all-without_metrics",
)


def runs_on(layout: Ranks, names: Iterable[str]) -> tuple[str, ...]:
    """The runs that there are: chunks of whole documents need documents on one rank."""
    shared = layout.sequence_data > 1 or layout.head_splits_tokens
    return tuple(name for name in names if not (shared and name == "gspo-single_pass"))


def assert_same_result(actual: WholeResult, expected: WholeResult, where: str) -> None:
    def close(name: str, a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(
            a.double(),
            b.double(),
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda text: f"{where}: {name}: {text}",
        )

    close("loss", actual.loss, expected.loss)
    for number, (a, b) in enumerate(zip(actual.grad_hidden, expected.grad_hidden, strict=True)):
        close(f"grad_hidden of document {number}", a, b)
    close("grad_weight", actual.grad_weight, expected.grad_weight)
    if expected.grad_bias is not None:
        assert actual.grad_bias is not None
        close("grad_bias", actual.grad_bias, expected.grad_bias)
    assert actual.metrics.keys() == expected.metrics.keys(), where
    for name, value in expected.metrics.items():
        close(name, actual.metrics[name], value)
