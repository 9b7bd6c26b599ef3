"""What `fastrl estimate` says of parameters and collectives is what ranks hold and send."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks.scaling_table import table
from fastrl import BatchCounts, Document, LlamaConfig, TokenBatch
from fastrl.config.training import ParallelConfig
from fastrl.estimate.collectives import collectives
from fastrl.estimate.sizes import Shapes, Weights
from fastrl.models.llama import Llama
from fastrl.models.micro_sequences import backward_in_pieces
from fastrl.models.parallelize import parallelize_llama, reduce_gradients
from tests.helpers.collectives import CollectiveRecord
from tests.helpers.layouts import Ranks
from tests.helpers.ranks import RankPool, rank_mesh

TOKENS = 64
MODEL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head": {"losses": {"policy": {"type": "grpo"}}, "strategy": "recompute", "metrics": False},
}
RECOMPUTED = {"mlp": "attention", "all": "full"}
"""Activation checkpointing by the first part of a case's name."""
CASES = {
    "sdp2": {"sequence_data": 2},
    "sdp2_ms2": {"sequence_data": 2, "micro_sequences": 2},
    "tp2": {"tensor": 2},
    "stp2": {"tensor": 2, "sequence_parallel": True},
    "fsdp2": {"data": 2, "fully_sharded": True},
    "fsdp2_backward": {"data": 2, "fully_sharded": True, "reshard_after": "backward"},
    "fsdp2_update": {"data": 2, "fully_sharded": True, "reshard_after": "update"},
    "fsdp2_backward_ms2": {
        "sequence_data": 2,
        "fully_sharded": True,
        "reshard_after": "backward",
        "micro_sequences": 2,
    },
    "fsdp2_update_ms2": {
        "sequence_data": 2,
        "fully_sharded": True,
        "reshard_after": "update",
        "micro_sequences": 2,
    },
    "dp2_sdp2": {"data": 2, "sequence_data": 2},
    "fsdp2_ms4": {"sequence_data": 2, "fully_sharded": True, "micro_sequences": 4},
    "tied_fsdp2_ms2": {"sequence_data": 2, "fully_sharded": True, "micro_sequences": 2},
    "fsdp2_stp2": {"data": 2, "tensor": 2, "sequence_parallel": True, "fully_sharded": True},
    "mlp_stp2": {"tensor": 2, "sequence_parallel": True},
    "mlp_sdp2_ms2": {"sequence_data": 2, "micro_sequences": 2},
    "all_sdp2_ms2": {"sequence_data": 2, "micro_sequences": 2},
    "mlp_stp2_ms2": {"tensor": 2, "sequence_parallel": True, "micro_sequences": 2},
    "mlp_fsdp2_tp2": {"data": 2, "tensor": 2, "fully_sharded": True},
    "all_stp2": {"tensor": 2, "sequence_parallel": True},
    "all_tp2": {"tensor": 2},
    "qwen3_tp2": {"tensor": 2},
    "qwen3_stp2_ms2": {"tensor": 2, "sequence_parallel": True, "micro_sequences": 2},
    "qwen3_fsdp2_tp2": {"data": 2, "tensor": 2, "fully_sharded": True},
    "single_pass_tp2": {"tensor": 2},
    "single_pass_stp2": {"tensor": 2, "sequence_parallel": True},
}


def record(config: ParallelConfig, model: LlamaConfig) -> tuple[int, dict[tuple[str, str], int]]:
    """Parameters on this rank, and the bytes of its collectives by axis and name."""
    mesh = rank_mesh(config.data, config.sequence_data, config.tensor)
    llama = Llama(model)
    groups = parallelize_llama(
        llama,
        mesh,
        sequence_parallel=config.sequence_parallel,
        fully_sharded=config.fully_sharded,
        reshard_after=config.reshard_after,
    )
    held = [p.to_local() if isinstance(p, DTensor) else p for p in llama.parameters()]
    tokens = [number % 40 for number in range(TOKENS)]
    # A label at every token but the last.
    document = Document(tokens=tokens, prompt_length=1, logprobs=[-3.0] * 63, advantage=1.0)
    batch = TokenBatch.from_documents([document])
    options = {"layout": config.sequence_layout, "counts": BatchCounts.of([batch], groups)}
    pieces = batch.to_kwargs(groups, config.micro_sequences, **options)  # type: ignore[arg-type]
    joined = batch.to_kwargs(groups, config.micro_sequences, join=True, **options)  # type: ignore[arg-type]
    with CollectiveRecord() as recorded:
        if len(pieces) > 1:
            reshards = config.reshard_after != "update"
            backward_in_pieces(llama, pieces, joined[0], reshards=reshards)
        else:
            loss = llama(pieces[0]).loss
            assert loss is not None
            loss.backward()
        reduce_gradients(llama)
    tensor_ranks = tuple(range(config.tensor))
    sent: Counter[tuple[str, str]] = Counter()
    for call in recorded.calls:
        if call.dtype == "torch.float32":  # not the positions, which are small
            axis = "tensor" if config.tensor > 1 and call.ranks == tensor_ranks else "others"
            sent[axis, call.name] += 4 * call.num_elements
    return sum(tensor.numel() for tensor in held), dict(sent)


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_ranks_hold_and_send(ranks: RankPool, name: str) -> None:
    config = ParallelConfig.model_validate(CASES[name])
    is_single_pass = name.startswith("single_pass")
    head = MODEL["head"] | {"strategy": "single_pass" if is_single_pass else "recompute"}
    changes = {"tie_word_embeddings": name.startswith("tied"), "head": head}
    first = name.partition("_")[0]
    if first == "qwen3":
        changes["architecture"] = first
    if first in RECOMPUTED:
        changes["activation_checkpointing"] = RECOMPUTED[first]
    model = LlamaConfig.model_validate(MODEL | changes)
    layout = Ranks(config.data, config.sequence_data, config.tensor)
    num_parameters, sent = ranks(record, layout.world_size, config, model)[0]
    shapes = Shapes.of(config, TOKENS, "float32")
    weights = Weights.of(model, config.tensor)
    assert num_parameters == pytest.approx(weights.total / shapes.shards, rel=0.02)
    expected: Counter[tuple[str, str]] = Counter()
    for call in collectives(model, config, shapes, is_single_pass=is_single_pass):
        axis = "tensor" if call.axis == "tensor" else "others"
        expected[axis, call.name] += call.num_bytes * call.count
    assert sent.keys() == expected.keys()
    for key, num_bytes in expected.items():
        # The last token has no label; norms are not counted; FSDP2 pads.
        assert sent[key] == pytest.approx(num_bytes, rel=0.04), key


def test_the_model_has_as_many_parameters() -> None:
    options: list[dict[str, Any]] = [
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {},
        {"architecture": "qwen2"},
        {"architecture": "qwen3"},
    ]
    for option in options:
        model = LlamaConfig.model_validate(MODEL | option)
        with torch.device("meta"):
            llama = Llama(model)
        assert Weights.of(model, 1).total == sum(p.numel() for p in llama.parameters())


def test_the_table_of_the_docs_is_what_the_formulas_say() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "scaling.md"
    assert table() in page.read_text(encoding="utf-8")
