"""torchtitan's losses of experiments/rl, on packed rows of fp32 logits or of hidden states."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frameworks.batch import Piece, RecordedBatch, Split
from benchmarks.frameworks.rows import Row, installed

PACKAGE = "torchtitan.experiments.rl"


def losses() -> ModuleType:
    """Its module of losses, without the package around it, which imports vLLM."""
    experiments = installed("torchtitan.experiments")
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(Path(folder) / "rl") for folder in experiments.__path__]
        sys.modules[PACKAGE] = package
    return installed(f"{PACKAGE}.losses")


def step(
    recorded: RecordedBatch,
    split: Split,
    *,
    loss: str,
    settings: dict[str, float],
    num_chunks: int | None = None,
) -> Tensor:
    """Gradients add up over micro-batches and ranks (FSDP's division is switched off)."""
    config = getattr(losses(), loss).Config(**settings)
    if num_chunks is not None:
        wrapper = installed("torchtitan.components.loss").ChunkedLossWrapper
        config = wrapper.Config(num_chunks=num_chunks, loss_fn=config)
    total = recorded.weight.new_zeros(())
    for rank in split:
        for numbers in rank:
            total = total + micro_batch(config, recorded.piece(numbers), recorded, num_chunks)
    return total


def micro_batch(
    config: Any, piece: Piece, recorded: RecordedBatch, num_chunks: int | None
) -> Tensor:
    """The loss of a micro-batch, as `PolicyTrainer.forward_backward` calls it."""
    loss = config.build(compile_config=None)
    inputs = {name: value[piece.present][None] for name, value in columns(piece).items()}
    hidden = piece.hidden[piece.slots][piece.present][None].float()
    if num_chunks is not None:
        extra = -hidden.shape[1] % num_chunks
        inputs = {name: nn.functional.pad(value, (0, extra)) for name, value in inputs.items()}
        hidden = nn.functional.pad(hidden, (0, 0, 0, extra))
    labels = inputs.pop("labels")
    if num_chunks is None:
        logits = hidden @ piece.weight.float().T
        value: Tensor = loss(logits, labels, recorded.num_labels, **inputs)[0]
        return value.double()
    return chunked(loss, hidden, labels, inputs, piece, recorded.num_labels)


def columns(piece: Piece) -> dict[str, Tensor]:  # [B, C] each
    """What the losses get beside the logits."""
    return {
        "labels": piece.ids,
        "generator_logprobs": piece.column("logprobs").float(),
        "advantages": piece.advantages.float()[:, None].expand(piece.mask.shape),
        "loss_mask": piece.mask,
    }


def chunked(
    loss: Any,
    hidden: Tensor,
    labels: Tensor,
    inputs: dict[str, Tensor],
    piece: Piece,
    num_labels: int,
) -> Tensor:
    """The wrapper's loss with both gradients: it runs the backward of the head by itself."""
    head = nn.Linear(hidden.shape[-1], piece.weight.shape[0], bias=False)
    with torch.no_grad():
        head.weight.copy_(piece.weight)
    loss.set_lm_head(head)
    leaf = hidden.detach().requires_grad_()
    value: Tensor = loss(leaf, labels, num_labels, **inputs)[0]
    value.backward()
    assert leaf.grad is not None
    assert head.weight.grad is not None
    # A scalar of that value and those gradients.
    linear: Tensor = (hidden * leaf.grad).sum() + (piece.weight * head.weight.grad).sum()
    return linear - linear.detach() + value.detach().double()


def all_rows() -> list[Row]:
    """Every row of torchtitan."""
    equal, higher = {"clip_eps": 0.2}, {"ratio_clip_low": 0.2, "ratio_clip_high": 0.28}
    config = {"type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    found = [
        Row("torchtitan", name, partial(step, **arguments), fastrl)
        for name, arguments, fastrl in (
            ("GRPOLoss, clip_eps: 0.2", {"loss": "GRPOLoss", "settings": equal}, config),
            (
                "DAPOLoss, ratio_clip_low: 0.2, ratio_clip_high: 0.28",
                {"loss": "DAPOLoss", "settings": higher},
                {"type": "grpo", "preset": "dapo"},
            ),
            (
                "ChunkedLossWrapper of GRPOLoss, num_chunks: 4",
                {"loss": "GRPOLoss", "settings": equal, "num_chunks": 4},
                config,
            ),
        )
    ]
    masked = partial(step, loss="GRPOLoss", settings=equal)
    words = "GRPOLoss, clip_eps: 0.2, truncated completions masked"
    found.append(Row("torchtitan", words, masked, config, masked=True))
    return found
