"""What an update is held to, a ratio a row: in one process, on one card.

    python -m benchmarks.update_bars --json benchmarks/results/update-bars-llama-1b.json

Each row has its value, the least that is asked and what is aimed at: bounds from above where the
aim is below what is asked. A row is written when it is known, so a run that is cut short leaves
those before. `--attention varlen` and `flash4` compare the two where both run; without it the
fastest one is taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.balance_table import LENGTHS, draw_documents, flops, slowest
from benchmarks.measure import environment, time_interleaved
from benchmarks.peers import NotRun
from benchmarks.update import as_many_as_fit, kernel_times
from benchmarks.update_cases import (
    MODELS,
    Update,
    Variant,
    add_sizes,
    fastest_attention,
    prompt_documents,
    ragged_documents,
)
from benchmarks.update_peer import PeerUpdate
from benchmarks.update_train import train_row
from fastrl import Document
from fastrl.estimate.arithmetic import PEAK

Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """What a row is compared with.

    Attributes:
        what: the row's name.
        least: that is asked.
        aim: that is aimed at.
    """

    what: str
    least: float
    aim: float


BARS = {
    "ranks": Bar("FLOPs of the slowest over the mean of 4 ranks", 1.05, 1.02),
    "body": Bar("forward and backward, share of the peak by 6 N T", 0.54, 0.60),
    "forwards": Bar("time of a step without over with a second forward", 0.80, 0.76),
    "kept": Bar("with checkpoints of attention, share by 6 N T", 0.43, 0.48),
    "prefixes": Bar("tokens/s of shared over flat prompts", 2.5, 3.1),
    "train": Bar("tokens/s of fastrl train over forward and backward", 0.93, 0.97),
    "peer": Bar("tokens/s over transformers with TRL's head", 3.0, 4.0),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser)
    parser.add_argument("--attention", help="implementation; default: the fastest that runs")
    parser.add_argument("--rows", default=",".join(BARS))
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    options.attention = options.attention or fastest_attention(on_gpu)
    torch._dynamo.config.recompile_limit = 64
    chosen, rows = options.rows.split(","), []
    about = {"model": options.model, "attention": options.attention, **environment()}
    start = time.monotonic()
    for name, row in Bars(options, torch.device("cuda" if on_gpu else "cpu")).run(chosen):
        rows.append({"row": name, **vars(BARS[name]), **row, **about})
        print(line(name, row), f"[{time.monotonic() - start:.0f} s]", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


def line(name: str, row: Row) -> str:
    """A row as it is printed, with where the time went."""
    bar = BARS[name]
    text = f"{bar.what:52s} {row['value']:6.3f} (asked {bar.least}, aim {bar.aim})"
    for what, kernels in row.get("kernels_ms", {}).items():
        idle = 1 - kernels["kernels"] / kernels["wall"] if kernels else 0.0
        parts = ", ".join(f"{kind} {value}" for kind, value in kernels.items())
        text += f"\n    {what}: {parts}; idle {idle:.1%}"
    return text


class Bars:
    """The rows that were asked for.

    Args:
        options: of the command line.
        device: of the models.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        self._sizes = MODELS[options.model]
        vocabulary, tokens = self._sizes["vocab_size"], options.tokens
        draw = lambda number: ragged_documents(number, vocabulary, options.longest)  # noqa: E731
        self._one = as_many_as_fit(draw(tokens // 2), tokens)
        self._several = draw(tokens * (options.micro_batches - 1))
        self._speed = 0.0

    def run(self, names: Sequence[str]) -> Iterator[tuple[str, Row]]:
        """Names and rows."""
        if "ranks" in names:
            ratio = slowest(draw_documents(4 * 8, LENGTHS["log-normal"]), 4, flops)[0]
            yield "ranks", {"value": ratio}
        if {"body", "forwards", "train"} & set(names):
            yield from self._of_one_model(names)
        if "train" in names:
            yield "train", self._train()
        if "peer" in names and (row := self._peer()):
            yield "peer", row
        if "prefixes" in names:
            yield "prefixes", self._prefixes()
        if "kept" in names:
            yield "kept", self._share(self._update(activation_checkpointing="attention"))

    def _of_one_model(self, names: Sequence[str]) -> Iterator[tuple[str, Row]]:
        """The rows of one compiled model, whose speed others are compared with."""
        update = self._update()
        row = self._share(update)
        if "body" in names:
            run = update.bare(update.packed(self._one))
            yield "body", row | {"kernels_ms": {"forward and backward": kernel_times(run)}}
        runs = {"bare": update.bare(update.packed(self._several))}
        if "forwards" in names:
            runs |= {"without": lambda: self._step(update, second_forward=False)}
            runs |= {"with": lambda: self._step(update, second_forward=True)}
        times = self._medians(runs)
        self._speed = _tokens(self._several) / times["bare"] * 1e3
        if "forwards" in names:
            kernels = {name: kernel_times(runs[name]) for name in ("without", "with")}
            found = {"value": times["without"] / times["with"], "times_ms": times}
            yield "forwards", found | {"kernels_ms": kernels}

    def _update(self, **options: Any) -> Update:
        variant = Variant({"attention_implementation": self._options.attention, **options}, True)
        gc.collect()
        return Update(self._sizes, variant, self._device, self._options.tokens)

    def _step(self, update: Update, *, second_forward: bool) -> None:
        update.variant = replace(update.variant, second_forward=second_forward)
        update(self._several)

    def _share(self, update: Update) -> Row:
        """Forward and backward of one packed sequence."""
        time_ms = self._medians({"bare": update.bare(update.packed(self._one))})["bare"]
        tokens = _tokens(self._one)
        share = 6 * update.num_parameters * tokens / time_ms * 1e3 / PEAK
        return {"value": share, "times_ms": {"forward and backward": time_ms}, "tokens": tokens}

    def _prefixes(self) -> Row:
        prompt, answer = self._options.prompt, self._options.answer
        documents = prompt_documents(prompt, answer, 1, self._sizes["vocab_size"])
        runs = {}
        for name, room in (("flat", self._options.tokens), ("shared", prompt + 9 * answer)):
            kind = {"attention_implementation": self._options.attention}
            variant = Variant(kind, True, shares_prefixes=name == "shared")
            update = Update(self._sizes, variant, self._device, max(room, prompt + answer))
            runs[name] = update.bare(update.packed(documents))
        times = self._medians(runs)
        return {"value": times["flat"] / times["shared"], "times_ms": times}

    def _train(self) -> Row:
        gc.collect()
        torch.cuda.empty_cache()
        options = self._options
        found = train_row(self._sizes, self._several, options.tokens, options.attention)
        kernels = {"a step": found.pop("kernels_ms", {})}
        value = found["tokens_per_second"] / self._speed
        return {"value": value, **found, "bare": self._speed, "kernels_ms": kernels}

    def _peer(self) -> Row | None:
        try:
            peer = PeerUpdate(self._sizes, self._device)
        except NotRun as reason:
            print(f"peer not run: {reason}")
            return None
        ours, documents = self._update(), self._several
        runs = {"ours": lambda: ours(documents), "peer": lambda: peer(documents)}
        times = self._medians(runs)
        kernels = {name: kernel_times(run) for name, run in runs.items()}
        return {"value": times["peer"] / times["ours"], "times_ms": times, "kernels_ms": kernels}

    def _medians(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        times = time_interleaved(runs, repeats=self._options.repeats, warmup=2)
        return {name: statistics.median(each) for name, each in times.items()}


def _tokens(documents: Sequence[Document]) -> int:
    return sum(len(document.tokens) for document in documents)


if __name__ == "__main__":
    main()
