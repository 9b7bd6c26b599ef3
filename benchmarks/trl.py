"""Times a training step of a causal language model with heads of different make.

    python -m benchmarks.trl --json results.json

The body is transformers' Qwen3 in the sizes of Qwen3-0.6B with random weights and gradient
checkpointing; a step is its forward and backward on `--documents` padded rows and the GRPO loss of
their completions, of which `--inactive` have no advantage. Each head passes a gate on the gradients
of all parameters first; one that does not run is listed with the reason, and one that fails makes
the exit code 1. Weights are bf16, or fp32 under bf16 autocast. TRL's function is called by its own
`add_fused_lm_head`; pandas and datasets need not be installed for it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Step, environment, peak_bytes, summary, time_interleaved
from benchmarks.ours import GRPO
from benchmarks.peers import NotRun
from benchmarks.trl_case import (
    PRECISIONS,
    Case,
    Sizes,
    gradient_error,
    make_case,
    true_gradients,
)
from fastrl.config import LanguageModelHeadConfig
from fastrl.layers.language_model_head import LanguageModelHead

# bf16 logits alone cost some hundredths.
GATE = 0.15
# From a case to a forward that gives the loss.
Head = Callable[[Case], Callable[[], Tensor]]


def body(case: Case) -> Callable[[], Tensor]:
    """No head: the sum of the hidden states."""
    return lambda: case.model.model(case.tokens, use_cache=False).last_hidden_state.float().sum()


def own_logits(case: Case) -> Callable[[], Tensor]:
    """The model's logits, and log_softmax of them in fp32."""

    def forward() -> Tensor:
        logits = case.model(case.tokens, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1)
        labels = case.labels[:, :-1, None].clamp(min=0)
        return case.loss_of(logprobs.gather(-1, labels)[..., 0])

    return forward


def trl_head(with_fastrl: bool) -> Head:
    """TRL's fused head with the outputs that GRPO asks for."""

    def build(case: Case) -> Callable[[], Tensor]:
        utils = import_trl()
        model = case.twin()
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        labels = torch.full_like(case.labels, -100)
        labels[:, 1:] = case.labels[:, :-1]
        under: Callable[[], AbstractContextManager[None]] = nullcontext
        if with_fastrl:
            under = importlib.import_module("fastrl.integrations.trl").installed

        def forward() -> Tensor:
            with under():
                output = model(case.tokens, labels=labels, fused_lm_head=True)
            return case.loss_of(output.log_probs)

        return forward

    return build


def head_by_hand(case: Case) -> Callable[[], Tensor]:
    """fastrl's head without parameters, given the model's output layer in each call."""
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": case.sizes.hidden_size,
            "vocab_size": case.sizes.vocab_size,
            "losses": {"policy": GRPO},
        }
    )
    head = LanguageModelHead(config, owns_weight=False)
    model = case.model

    def forward() -> Tensor:
        hidden = model.model(case.tokens, use_cache=False).last_hidden_state
        loss: Tensor = head(
            hidden, case.batch, weight=model.lm_head, compute_dtype=torch.bfloat16
        ).loss
        return loss

    return forward


def attached_head(case: Case) -> Callable[[], Tensor]:
    """The adapter for transformers."""
    adapter = importlib.import_module("fastrl.integrations.transformers")
    model = case.twin()
    adapter.attach_head(model, {"policy": GRPO}, packing="padded")

    def forward() -> Tensor:
        loss: Tensor = model(batch=case.batch).loss
        return loss

    return forward


HEADS: dict[str, Head] = {
    "body alone": body,
    "own logits": own_logits,
    "TRL": trl_head(with_fastrl=False),
    "TRL with fastrl": trl_head(with_fastrl=True),
    "fastrl by hand": head_by_hand,
    "fastrl.integrations.transformers": attached_head,
}


def import_trl() -> Any:
    """`trl.trainer.utils`, also without the large packages that its head does not use."""
    for name in ("trl", "accelerate"):
        if find_spec(name) is None:
            raise NotRun(f"{name} is not installed")
    missing = [name for name in ("pandas", "datasets") if find_spec(name) is None]
    for name in missing:
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.IterableDataset = module.DataFrame = object  # type: ignore[attr-defined]
        sys.modules[name] = module
    try:
        return importlib.import_module("trl.trainer.utils")
    finally:
        for name in missing:
            del sys.modules[name]


def training_step(case: Case, forward: Callable[[], Tensor]) -> Step:
    """Forward and backward of all parameters."""

    def step() -> Tensor:
        case.model.zero_grad(set_to_none=True)
        with case.autocast():
            loss = forward()
        loss.backward()
        return loss.detach()

    return step


@contextmanager
def reasons(row: dict[str, Any]) -> Iterator[None]:
    """Keeps why a head does not run; `failed` is what should."""
    try:
        yield
    except NotRun as reason:
        row["reason"] = str(reason)
    except Exception as error:  # the others are still to be measured
        traceback.print_exc()
        row["reason"] = f"{type(error).__name__}: {str(error)[:300]}"
        row["failed"] = True


def run_precision(case: Case, chosen: list[str], repeats: int, warmup: int) -> list[dict[str, Any]]:
    """Gate and peak of each head, then all interleaved."""
    truth = true_gradients(case)
    weights = sum(p.nbytes for p in case.model.parameters())
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in chosen:
        row = {"head": name, "precision": case.precision, **vars(case.sizes), **environment()}
        rows[name] = row
        with reasons(row):
            step = training_step(case, HEADS[name](case))
            step()
            if name != "body alone":
                row["error_gradients"] = gradient_error(case, truth)
                if not row["error_gradients"] < GATE:
                    raise NotRun(f"gate: gradient error {row['error_gradients']:.2g}")
            case.model.zero_grad(set_to_none=True)
            over = peak_bytes(step)
            row["peak_bytes"] = None if over is None else over + weights
            steps[name] = step
        gc.collect()
    del truth
    times = time_interleaved(steps, repeats, warmup)
    for name in steps:
        rows[name].update(summary(times[name]))
    return list(rows.values())


def show(rows: list[dict[str, Any]]) -> None:
    """A short table."""
    first = rows[0]
    print(
        f"\n{first['precision']}: {first['documents']} x {first['length']} tokens, {first['gpu']}"
    )
    for row in rows:
        if "time_ms" not in row:
            print(f"  {row['head']:34s} {row.get('reason')}")
            continue
        peak, error = row["peak_bytes"], row.get("error_gradients")
        print(
            f"  {row['head']:34s} {row['time_ms']:9.2f} ms"
            f" [{row['time_p20_ms']:.2f} {row['time_p80_ms']:.2f}]"
            f" peak {'-' if peak is None else f'{peak / 2**30:.2f} GiB'}"
            f" error {'-' if error is None else f'{error:.1e}'}",
            flush=True,
        )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for size in fields(Sizes):
        option = "--" + size.name.replace("_", "-")
        parser.add_argument(option, type=int, default=size.default)
    parser.add_argument("--heads", default=",".join(HEADS), help="comma-separated")
    parser.add_argument("--precisions", default=";".join(PRECISIONS), help="with `;` between")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    sizes = Sizes(**{size.name: getattr(options, size.name) for size in fields(Sizes)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for precision in options.precisions.split(";"):
        case = make_case(sizes, precision, device)
        part = run_precision(case, options.heads.split(","), options.repeats, options.warmup)
        show(part)
        rows += part
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        del case
        gc.collect()
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
