"""The head over recorded sampling sets against the three matrix products of whole logits.

    python -m benchmarks.replay --json benchmarks/results/replay.json

`ratio` is the time of loss and gradients, or of log-probabilities alone, over that of the products
h W^T, dz W and dz^T h of as many rows, interleaved in one process; the errors are those of the
gradients against the same op in float64.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import SHAPES, Case, Truth, make_case
from benchmarks.measure import (
    environment,
    floor_steps,
    peak_bytes,
    relative_error,
    summary,
    time_interleaved,
)
from benchmarks.ours import GRPO
from fastrl.config.losses import LanguageModelHeadConfig
from fastrl.functional.batch import RowSet
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.layers.language_model_head import LanguageModelHead

# Sets of a sampler at top_p 0.97 and top_k 512, as prime-rl saw them: 46 % of one entry, median 2,
# mean 8, 99th percentile 82. Those of more than one are log-normal.
SHARE_OF_ONE = 0.465
LOG_MEAN, LOG_DEVIATION = 1.94, 1.19
MOST = 512


def recorded_sets(case: Case, scale: float, seed: int = 0) -> KeptTokens:
    """Ragged sets of the labelled tokens; `scale` 1 has a mean of 8 entries.

    Entries are log-uniform, so that some are recorded by many tokens, and hold the label.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = case.labels.cpu()
    count = len(labels)
    normal = torch.randn(count, generator=generator)
    sizes = (scale * (LOG_MEAN + LOG_DEVIATION * normal).exp()).ceil().clamp(2, MOST).long()
    is_one = torch.rand(count, generator=generator) < SHARE_OF_ONE
    sizes = torch.where(is_one & (scale == 1), 1, sizes)
    sizes = torch.where(labels == -100, 0, sizes)
    uniform = torch.rand(int(sizes.sum()), generator=generator)
    ids = (uniform * math.log(case.shape.vocab_size)).exp().long() - 1
    has_any = sizes > 0
    ids[(sizes.cumsum(0) - sizes)[has_any]] = labels[has_any]
    return KeptTokens.from_counts(ids, sizes).map(lambda values: values.to(case.labels.device))


def make_head(case: Case) -> LanguageModelHead:
    """A head over the case's weight, without a copy."""
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": case.shape.hidden_size,
            "vocab_size": case.shape.vocab_size,
            "losses": {"policy": GRPO},
            "keep": {"recorded": True},
            "metrics": False,
        }
    )
    head = LanguageModelHead(config, device="meta", dtype=case.weight.dtype)
    head.weight = nn.Parameter(case.weight.detach())
    return head


def gradients(case: Case) -> tuple[Tensor, Tensor]:
    """Of hidden states and weight."""
    head, hidden = make_head(case), case.hidden_states
    loss = head(hidden, case.batch).loss
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, head.weight))
    return grad_hidden, grad_weight


def errors(case: Case) -> list[float]:
    """Relative errors of dh and dW, against float64."""
    wide = replace(
        case,
        hidden_states=case.hidden_states.detach().double().requires_grad_(),
        weight=case.weight.detach().double(),
    )
    pairs = zip(gradients(case), gradients(wide), strict=True)
    return [relative_error(found, exact.float()) for found, exact in pairs]


def measure(name: str, scale: float, repeats: int, warmup: int) -> list[dict[str, Any]]:
    """A row for loss and gradients, and one for log-probabilities alone."""
    case = make_case(SHAPES[name], "cuda" if torch.cuda.is_available() else "cpu")
    kept = recorded_sets(case, scale)
    none = RowSet(index=case.labels[:0], document_ends=())  # all documents have sets
    batch = case.batch.replace(kept_tokens=kept, unrecorded_rows=none)
    case = replace(case, batch=batch)
    head = make_head(case)
    with torch.no_grad():
        old = head(case.hidden_states, case.batch, compute_loss=False).logprobs
    case = replace(case, batch=case.batch.replace(old_logprobs=old - 0.01 * (old < 0)))
    num_rows = len(case.active)
    grad_logits = torch.zeros(num_rows, case.shape.vocab_size, dtype=case.weight.dtype)
    nothing = torch.zeros(())
    truth = Truth(nothing, nothing, nothing, grad_logits.to(case.weight.device))

    @torch.no_grad()
    def evaluate() -> None:
        head(case.hidden_states, case.batch, compute_loss=False)

    steps: dict[str, Callable[[], object]] = {
        "fwdbwd": lambda: gradients(case),
        "fwd": evaluate,
        "floor": floor_steps(case, truth, num_rows, "fhw"),
    }
    times = time_interleaved(steps, repeats, warmup)
    floor = summary(times["floor"])["time_ms"]
    of_gradients = case.hidden_states.nbytes + case.weight.nbytes
    peak = peak_bytes(steps["fwdbwd"])
    rows: list[dict[str, Any]] = [
        {
            "shape_name": name,
            "rows": num_rows,
            "mean_entries": round(len(kept.ids) / len(case.labelled), 2),
            "passes": passes,
            **summary(times[passes]),
            "floor_ms": floor,
            "ratio": round(summary(times[passes])["time_ms"] / floor, 4),
            **environment(),
        }
        for passes in ("fwdbwd", "fwd")
    ]
    error_hidden, error_weight = errors(case)
    rows[0] |= {
        "error_hidden": error_hidden,
        "error_weight": error_weight,
        "peak_bytes_over_gradients": None if peak is None else peak - of_gradients,
    }
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="llama3-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--scales", default="1,4.5", help="4.5: sets of mean 64")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    rows = []
    for name in options.shapes.split(","):
        for scale in options.scales.split(","):
            for row in measure(name, float(scale), options.repeats, options.warmup):
                rows.append(row)
                print({key: row[key] for key in row if key not in environment()}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
