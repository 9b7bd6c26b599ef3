"""The table of docs/scaling.md: what Llama-3 needs at many sizes. Arithmetic; runs anywhere.

python -m benchmarks.scaling_table
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.table import markdown
from fastrl.config import GRPOLossConfig, LlamaConfig
from fastrl.config.training import ParallelConfig
from fastrl.estimate.collectives import collectives
from fastrl.estimate.head import head_ops
from fastrl.estimate.memory import GATHERED, GRADIENTS, PARAMETERS, PENDING, STATES, Step, peak
from fastrl.estimate.sizes import Shapes, Weights

GIB = 2**30
# Bytes a second and rank: inside of a host of eight GPUs, and between hosts.
INSIDE, BETWEEN = 350e9, 40e9
# Floating-point operations a second of a GPU: 40 % of an H100's dense bf16 peak.
SPEED = 400e12
GPU_GIB = 80

SHARED: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "activation_checkpointing": True,
}
LARGE: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336}
LARGER: dict[str, Any] = {"hidden_size": 8192, "intermediate_size": 28672}
MODELS = {
    "8B": LlamaConfig(num_hidden_layers=32, num_attention_heads=32, **LARGE, **SHARED),
    "70B": LlamaConfig(num_hidden_layers=80, num_attention_heads=64, **LARGER, **SHARED),
}
K = 2**10
# Model, tokens of a packed sequence, and sizes: data, sequence_data, tensor, micro-sequences.
ROWS = [
    ("8B", 128 * K, (1, 8, 1, 1)),
    ("8B", 128 * K, (8, 8, 1, 1)),
    ("8B", 128 * K, (128, 8, 1, 1)),
    ("8B", 1024 * K, (1, 8, 1, 8)),
    ("8B", 1024 * K, (2, 32, 1, 1)),
    ("8B", 1024 * K, (32, 32, 1, 1)),
    ("70B", 128 * K, (1, 1, 8, 8)),
    ("70B", 128 * K, (1, 8, 8, 1)),
    ("70B", 128 * K, (16, 8, 8, 1)),
    ("70B", 1024 * K, (1, 1, 8, 32)),
    ("70B", 1024 * K, (1, 8, 8, 8)),
    ("70B", 1024 * K, (4, 32, 8, 1)),
]


def table() -> str:
    """The table in Markdown."""
    head = [
        "model",
        "tokens",
        "GPUs",
        "data x seq x tensor, pieces",
        "states",
        "gathered",
        "activations",
        "head",
        "total GiB",
        "peak in the",
        "sent: tensor",
        "seq",
        "weights GiB",
        "network s",
        "compute s",
    ]
    return markdown([head, *(row(*values) for values in ROWS)])


def row(name: str, tokens: int, sizes: tuple[int, int, int, int]) -> list[str]:
    """One model on one layout."""
    data, sequence_data, tensor, pieces = sizes
    model = MODELS[name]
    parallel = ParallelConfig(
        data=data,
        sequence_data=sequence_data,
        tensor=tensor,
        sequence_parallel=tensor > 1,
        micro_sequences=pieces,
        fully_sharded=True,
        compute_dtype="bfloat16",
    )
    shapes = Shapes.of(parallel, tokens, "float32")
    losses = {"policy": GRPOLossConfig()}
    step = Step(model, parallel, shapes, losses)
    moment, items = peak(step)

    def part(choose: Callable[[str], bool]) -> float:
        return sum(item.num_bytes for item in items if choose(item.name)) / GIB

    states = part(lambda name: name in (PARAMETERS, GRADIENTS, STATES))
    gathered = part(lambda name: name in (GATHERED, PENDING))
    head = part(lambda name: name.startswith("head"))
    total = part(lambda name: True)
    sent = dict.fromkeys(("tensor", "sequence_data", "weights"), 0.0)
    seconds = 0.0
    is_single_pass = head_ops(model.head, losses, step.head_shape)[0].is_single_pass
    for call in collectives(model, parallel, shapes, is_single_pass=is_single_pass):
        axis = call.axis if call.axis in sent else "weights"
        sent[axis] += call.sent_bytes / GIB
        span = {"tensor": tensor, "sequence_data": sequence_data * tensor}
        inside = span.get(axis, parallel.num_processes) <= 8
        seconds += call.sent_bytes / (INSIDE if inside else BETWEEN)
    return [
        name,
        f"{tokens // K}k",
        str(parallel.num_processes),
        f"{data} x {sequence_data} x {tensor}, {pieces}",
        f"{states:.1f}",
        f"{gathered:.1f}",
        f"{total - states - gathered - head:.1f}",
        f"{head:.1f}",
        f"**{total:.0f}**" if total > GPU_GIB else f"{total:.0f}",
        moment,
        f"{sent['tensor']:.0f}",
        f"{sent['sequence_data']:.0f}",
        f"{sent['weights']:.0f}",
        f"{seconds:.1f}",
        f"{compute_seconds(model, parallel, tokens):.1f}",
    ]


def compute_seconds(model: LlamaConfig, parallel: ParallelConfig, tokens: int) -> float:
    """Of forward, recomputed forward and backward, with one document in the sequence.

    2 operations a weight and token forward and 4 backward; for attention, on average over half of
    the sequence, 2 T (heads head_dim) forward a layer and token and twice that backward.
    """
    passes = 4 + (parallel.micro_sequences > 1)
    weights = 2 * passes * Weights.of(model, 1).total
    width = model.num_attention_heads * model.head_dim
    attention = 2 * passes * tokens * width * model.num_hidden_layers
    ranks = parallel.sequence_data * parallel.tensor
    return tokens * (weights + attention) / ranks / SPEED


if __name__ == "__main__":
    print(table(), end="")
