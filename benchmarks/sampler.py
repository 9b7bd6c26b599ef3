"""The built-in sampler: a decoding step, and a whole training step around it.

    python -m benchmarks.sampler --json benchmarks/results/sampler.json

64 completions of 400 tokens after prompts of 200, of a 1B model in bf16 on one device: the prompts'
forward, a decoding step with what its kernels belong to, and a step of the trainer on them (AdamW
on fp32 weights, bf16 products). `launched` is each step from Python on tensors that grow, `graph`
what runs on a GPU. `launched, any attention` leaves the choice of attention's kernels to torch,
which may build them for each length.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import environment
from benchmarks.memory_cases import llama
from benchmarks.update_cases import MODELS
from fastrl import Llama
from fastrl.config import RunConfig, parse_config
from fastrl.config.training import ParallelConfig
from fastrl.training.context import RunContext, build_context, processes_of
from fastrl.training.cuda_graph import repeated
from fastrl.training.draws import Drawing, Draws
from fastrl.training.llama_model import LlamaDecoder, LlamaModel
from fastrl.training.phases import Phase
from fastrl.training.processes import Processes
from fastrl.training.rollout_sources import build_sources
from fastrl.training.sampler import ATTENTION

VARIANTS: dict[str, int | None] = {"launched": 1, "graph": None}  # the cache's blocks
ANY = "launched, any attention"
# Kernels by what they belong to, the first that matches.
KERNELS = {
    "attention": ("fmha", "flash", "attention", "sdpa", "cudnn_generated"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitk"),
    "sampling": ("softmax", "distribution", "argmax", "exp_kernel"),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-1b", choices=MODELS)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--steps", type=int, default=50, help="that are timed")
    parser.add_argument("--parts", default="decoding,training,any")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    sizes = ("model", "sequences", "prompt", "new")
    common = {**{name: getattr(options, name) for name in sizes}, **environment()}
    rows: list[dict[str, Any]] = []
    parts = {"decoding": decoding_rows, "training": training_rows, "any": any_attention_rows}
    for part in options.parts.split(","):
        for row in parts[part](options):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps({**common, "rows": rows}, indent=1) + "\n")
        gc.collect()


def decoding_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The prompts' forward and steps, with random weights."""
    for variant, block in VARIANTS.items():
        with sdpa_kernel(ATTENTION):
            yield from step_rows(options, variant, block)


def any_attention_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same steps, launched, with the kernels that torch prefers."""
    return step_rows(options, ANY, VARIANTS["launched"])


@torch.no_grad()
def step_rows(
    options: argparse.Namespace, variant: str, block: int | None
) -> Iterator[dict[str, Any]]:
    """The prompts' forward, and steps that follow it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = llama(MODELS[options.model])
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Llama(config, device=device, dtype=dtype).eval()
    decoder = LlamaDecoder(model, Processes(ParallelConfig(), 0, device, None), block_size=block)
    generator = torch.Generator(device)
    vocabulary = config.vocab_size or 0
    prompts = torch.randint(vocabulary, (options.sequences, options.prompt)).tolist()
    drawing = Drawing(1.0, torch.tensor([-1], device=generator.device), generator, False)
    decoder.prefill(prompts[:1], options.new)
    seconds, (logits, cache) = timed(lambda: decoder.prefill(prompts, options.new))
    yield {"what": "prompts", "variant": variant, "time_ms": round(1e3 * seconds, 1)}
    draws = Draws(decoder, drawing, cache, logits, options.new)
    del logits
    draws.step()
    while 1 < cache.room < options.steps + 10:
        draws.step()  # to a block with room for what follows
    is_graph = variant == "graph"
    begin = time.perf_counter()
    with repeated(draws.step, generator) if is_graph else nullcontext(draws.step) as step:
        capture = time.perf_counter() - begin

        def steps() -> None:
            for _ in range(options.steps):
                step()

        ms = 1e3 * timed(steps)[0] / options.steps
        kernels = kernel_times(step)
    row = {"what": "step", "variant": variant, "time_ms": round(ms, 3), "kernels_ms": kernels}
    if is_graph:
        row["capture_ms"] = round(1e3 * capture, 1)
    yield row


def kernel_times(step: Callable[[], None], number: int = 8) -> dict[str, float]:
    """Milliseconds of a step's kernels by what they belong to, and their number."""
    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(number):
            step()
        torch.cuda.synchronize()
    times = dict.fromkeys([*KERNELS, "rest"], 0.0)
    count = 0
    for event in recorded.key_averages():
        name = event.key.lower()
        kind = next((each for each, parts in KERNELS.items() if any(p in name for p in parts)), "")
        times[kind or "rest"] += event.self_device_time_total / 1e3 / number
        count += event.count if event.self_device_time_total else 0
    return {**{kind: round(value, 3) for kind, value in times.items()}, "number": count // number}


def training_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A step of the trainer in each variant, after one that compiles kernels."""
    config = training_config(options)
    context = build_context(config, processes=processes_of(config))
    phase = Phase(config, 0, context, build_sources(config, context)[0])
    phase.step()
    for variant, block in VARIANTS.items():
        use_blocks(context, block)
        times: dict[str, float] = {}
        record(times, "sampling", context.sampler, "sample")
        record(times, "scoring", context.environment, "score")
        total, result = timed(phase.step)
        times["update"] = total - sum(times.values())
        row = {"what": "training step", "variant": variant, "seconds": round(total, 3)}
        tokens = result.metrics["completion_length"] * options.sequences
        parts = {f"{name}_s": round(value, 3) for name, value in times.items()}
        yield {**row, **parts, "sampled_tokens": round(tokens)}
    context.processes.close()


def training_config(options: argparse.Namespace) -> RunConfig:
    """One RL phase on the sampler's completions."""
    sizes = {key: value for key, value in MODELS[options.model].items() if key != "vocab_size"}
    on_gpu = torch.cuda.is_available()
    groups = max(options.sequences // 8, 1)
    parallel = {"fully_sharded": True, "compute_dtype": "bfloat16"} if on_gpu else {}
    fast = {"attention_implementation": "varlen"} if on_gpu else {}
    documents = options.prompt + options.new
    values = {
        "model": {"type": "llama", "vocab_size": MODELS[options.model]["vocab_size"]}
        | {"activation_checkpointing": "full", **sizes, **fast},
        "parallel": parallel,
        "tokenizer": {"type": "character"},
        "environment": {"type": "python", "path": "benchmarks.sampler_task:Draw", "fence": False}
        | {"config": {"length": options.prompt}, "train_prompts": 256, "heldout_prompts": 1},
        "sampler": {"max_new_tokens": options.new, "max_batch_size": options.sequences},
        "phases": [
            {"type": "rl", "steps": 8, "losses": {"policy": {"type": "grpo"}}}
            | {"max_tokens_per_micro_batch": max(16384, documents)}
            | {"rollouts": {"type": "sampler", "prompts_per_step": groups, "group_size": 8}}
        ],
    }
    return parse_config(RunConfig, values)


def use_blocks(context: RunContext, block: int | None) -> None:
    """Has the run's sampler decode with a cache of such blocks."""
    model = context.model
    assert isinstance(model, LlamaModel)
    context.sampler._decoder = LlamaDecoder(model.module, context.processes, block_size=block)


def record(times: dict[str, float], name: str, owner: Any, method: str) -> None:
    """Adds up the seconds of a method's calls."""
    call = getattr(type(owner), method).__get__(owner)

    def measured(*arguments: Any, **options: Any) -> Any:
        seconds, result = timed(lambda: call(*arguments, **options))
        times[name] = times.get(name, 0.0) + seconds
        return result

    setattr(owner, method, measured)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, the device's work included, and its result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
