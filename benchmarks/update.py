"""A whole update: from rollout documents with rewards to changed weights, on one device.

    python -m benchmarks.update --model llama-1b --json benchmarks/results/update-llama-1b.json

Rows: forward and backward of one packed sequence, in each variant; a whole update of several
micro-batches, packing and optimizer included; documents of long prompts with and without shared
prefixes. `share` is 6 N T over time and the card's dense bf16 peak, `share with attention` counts
the arithmetic of `fastrl.models.flops` instead; neither counts what is recomputed.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import environment, peak_bytes, summary, time_interleaved
from benchmarks.memory_cases import llama
from benchmarks.peers import NotRun
from benchmarks.update_cases import (
    MODELS,
    Update,
    Variant,
    add_sizes,
    flops,
    prompt_documents,
    ragged_documents,
    variants,
)
from benchmarks.update_peer import PeerUpdate
from fastrl import Document
from fastrl.estimate.arithmetic import PEAK

# Kernels by what they belong to, the first that matches; products are told apart by who calls.
KERNELS = {
    "attention": ("flash", "flex", "sdpa", "fmha"),
    "head": ("linear_kernel", "finish_exponentials", "row_", "scatter_scaled", "scale_"),
    "optimizer": ("adam", "foreach", "multi_tensor"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "mm_"),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser)
    parser.add_argument("--variants", help="names, with `;` between them; all without")
    parser.add_argument("--parts", default="variants,peer,prefixes")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.config.recompile_limit = 64
    known = variants(device.type == "cuda")
    names = options.variants.split(";") if options.variants else list(known)
    rows: list[dict[str, Any]] = []
    for part in runs(names, known, options, device):
        rows += part
        gc.collect()
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


def runs(
    names: Sequence[str],
    known: dict[str, Variant],
    options: argparse.Namespace,
    device: torch.device,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of what was asked for."""
    parts = options.parts.split(",")
    if "variants" in parts:
        for name in names:
            yield run_variant(name, known[name], options, device)
    if "peer" in parts:
        yield run_peer(options, device)
    if "prefixes" in parts:
        yield run_prefixes(known["compiled"], options, device)


def run_variant(
    name: str, variant: Variant, options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Rows of forward and backward, and of the whole update."""
    update = Update(MODELS[options.model], variant, device, options.tokens)
    vocabulary = update.config.vocab_size
    assert vocabulary is not None
    documents = ragged_documents(options.tokens // 2, vocabulary, options.longest)
    one = as_many_as_fit(documents, options.tokens)
    several = ragged_documents(options.tokens * options.micro_batches, vocabulary, options.longest)
    rows = []
    if not variant.second_forward:
        bare = update.bare(update.packed(one))
        rows.append(_timed("forward and backward", name, bare, one, update, options))
    run = lambda: update(several)  # noqa: E731
    row = _timed("update", name, run, several, update, options)
    start = time.perf_counter()
    row["micro_batches"] = len(update.packed(several))
    row["packing_ms"] = round(1e3 * (time.perf_counter() - start), 1)
    row["kernels_ms"] = kernel_times(run)
    rows.append(row)
    print(json.dumps(row["kernels_ms"]), flush=True)
    return rows


def run_peer(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The row of the same documents in transformers under TRL's head, where both are installed."""
    model = MODELS[options.model]
    documents = ragged_documents(
        options.tokens * options.micro_batches, model["vocab_size"], options.longest
    )
    try:
        peer = PeerUpdate(model, device)
    except NotRun as reason:
        print(f"peer not run: {reason}")
        return []
    name = "transformers and TRL's head"
    return [_timed("update", name, lambda: peer(documents), documents, peer, options)]


def run_prefixes(
    variant: Variant, options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Rows of the same documents, flat and with shared prompts."""
    rows = []
    for shares in (False, True):
        chosen = replace(variant, shares_prefixes=shares)
        most = options.prompt + 9 * options.answer if shares else options.tokens
        most = max(most, options.prompt + options.answer)
        update = Update(MODELS[options.model], chosen, device, most)
        vocabulary = update.config.vocab_size
        assert vocabulary is not None
        documents = prompt_documents(options.prompt, options.answer, 1, vocabulary)
        name = "shared prefixes" if shares else "flat"
        run = update.bare(update.packed(documents))
        rows.append(_timed("long prompts", name, run, documents, update, options))
    return rows


def _timed(
    kind: str,
    name: str,
    run: Callable[[], object],
    documents: Sequence[Document],
    update: Update | PeerUpdate,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The row of a run on documents."""
    times = time_interleaved({name: run}, repeats=options.repeats, warmup=2)[name]
    row: dict[str, Any] = {"kind": kind, "variant": name, "model": options.model, **summary(times)}
    seconds = row["time_ms"] / 1e3
    tokens = sum(len(document.tokens) for document in documents)
    arithmetic = flops(llama(MODELS[options.model]), documents)
    row |= {
        "documents": len(documents),
        "tokens": tokens,
        "longest": max(len(document.tokens) for document in documents),
        "parameters": update.num_parameters,
        "tokens_per_second": round(tokens / seconds),
        "share": round(6 * update.num_parameters * tokens / seconds / PEAK, 4),
        "share_with_attention": round(arithmetic / seconds / PEAK, 4),
        "peak_bytes": peak_bytes(run),
        **environment(),
    }
    gc.collect()
    print(
        f"{kind:22s} {name:38s} {row['time_ms']:9.1f} ms {row['tokens_per_second']:8,} tokens/s"
        f" share {row['share']:.3f}, with attention {row['share_with_attention']:.3f},"
        f" peak {(row['peak_bytes'] or 0) / 2**30:.1f} GiB",
        flush=True,
    )
    return row


def kernel_times(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the device's kernels by what they belong to, and the wall time around."""
    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    times = times_of_kernels(recorded) | {"wall": 1e3 * wall}
    return {kind: round(value, 1) for kind, value in times.items()}


def times_of_kernels(recorded: profile) -> dict[str, float]:
    """Milliseconds of the device's kernels by what they belong to, and of all of them."""
    times: dict[str, float] = {}
    for event in recorded.key_averages():
        name = event.key.lower()
        kind = next(
            (kind for kind, parts in KERNELS.items() if any(part in name for part in parts)), "rest"
        )
        times[kind] = times.get(kind, 0.0) + event.self_device_time_total / 1e3
    return times | {"kernels": sum(times.values())}


def as_many_as_fit(documents: Sequence[Document], num_tokens: int) -> list[Document]:
    """Documents of at most `num_tokens` together, those that do not fit left out."""
    chosen: list[Document] = []
    left = num_tokens
    for document in documents:
        if len(document.tokens) <= left:
            chosen.append(document)
            left -= len(document.tokens)
    return chosen


if __name__ == "__main__":
    main()
