"""Liger's fused GRPO loss: its module on hidden states and weight, in fp32."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.frameworks import trl
from benchmarks.frameworks.batch import LIMIT, RecordedBatch, Split
from benchmarks.frameworks.rows import CLIP, NARROW, TOKENS_OF_MICRO_BATCH, Row, in_words, installed

# Those that are divided by the tokens of the step, not of the micro-batch.
BY_TOKENS = ("dapo", "cispo", "vespo")


def step(
    recorded: RecordedBatch,
    split: Split,
    *,
    loss_type: str,
    total: bool = True,
    **settings: Any,
) -> Tensor:
    """Gradients add up over micro-batches, mean over ranks.

    With `total` the losses over tokens get `num_items_in_batch`, the labels of the step; those of
    means over a micro-batch are divided by the number of micro-batches, as TRL did around it.
    """
    module = installed("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss(
        compiled=False,
        loss_type=loss_type,
        max_completion_length=LIMIT,
        chunk_size=2,
        **({"beta": 0.0} | settings),
    )
    by_total = total and loss_type in BY_TOKENS
    result = recorded.weight.new_zeros(())
    for micro_batch in range(len(split[0])):
        pieces = [recorded.piece(rank[micro_batch]) for rank in split]
        labels = sum(int(piece.mask.sum()) for piece in pieces)
        for piece in pieces:
            with ranks(len(split), labels):
                loss, _ = module(
                    piece.hidden[piece.slots].float(),
                    piece.weight.float(),
                    piece.ids,
                    piece.mask.float(),
                    piece.advantages.float(),
                    ref_per_token_logps=piece.column("ref_logprobs"),
                    old_per_token_logps=piece.column("logprobs"),
                    num_items_in_batch=recorded.num_labels if by_total else None,
                )
            result = result + loss.double() / (1 if by_total else len(split[0])) / len(split)
    return result


def ranks(number: int, labels: int) -> Any:
    """The default group as one of several ranks sees it, whose sum of labels is known."""

    def all_reduce(value: Tensor, op: Any) -> None:
        value.fill_(labels)

    return patch.multiple(
        torch.distributed,
        is_initialized=lambda: True,
        get_world_size=lambda: number,
        all_reduce=all_reduce,
    )


def options(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of the loss, where TRL's default is not Liger's: the corrected KL."""
    found = trl.without_mask(settings)
    return {"use_bias_correction_kl": True} | found if "beta" in settings else found


def all_rows() -> list[Row]:
    """Every row of Liger."""
    found = [
        Row(
            "Liger",
            in_words({"loss_type": loss_type} | options(settings), CLIP, NARROW)
            + (", truncated completions masked" if settings.keys() >= trl.MASKED.keys() else ""),
            partial(step, loss_type=loss_type, **options(settings)),
            config,
            reason,
            masked="mask_truncated_completions" in settings,
        )
        for loss_type, settings, config, reason in trl.LOSSES
    ]
    found.append(
        Row(
            "Liger",
            "loss_type: dapo, no num_items_in_batch",
            partial(step, loss_type="dapo", total=False, **CLIP),
            {"type": "grpo"} | CLIP,
            TOKENS_OF_MICRO_BATCH,
        )
    )
    return found
