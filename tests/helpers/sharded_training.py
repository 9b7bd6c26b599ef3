"""The model matrix: a small Llama trained three steps on every layout, run on ranks of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl import BatchCounts, Document, LlamaConfig, TokenBatch
from fastrl.config.loading import load_config
from fastrl.config.training import ReshardAfter
from fastrl.layers.language_model_head import HeadOutput
from fastrl.layers.losses import add_metrics, reduce_metrics
from fastrl.models.compiled import compile_layers
from fastrl.models.llama import Llama
from fastrl.models.micro_sequences import backward_in_pieces
from fastrl.models.parallelize import parallelize_llama, reduce_gradients
from fastrl.parallel import ParallelGroups, group_rank, group_size
from tests.helpers.layouts import Ranks
from tests.helpers.ranks import rank_device, rank_mesh

CONFIGS = Path(__file__).parent / "configs"
NUM_STEPS = 3
LEARNING_RATE = 0.1
# Named, as a rank may be without documents.
COLUMNS = ("advantages", "old_logprobs")


@dataclass(frozen=True)
class Variant:
    """How the same training is carried out."""

    name: str
    ranks: Ranks = field(default_factory=Ranks)
    fully_sharded: bool = False
    reshard_after: ReshardAfter = "forward"
    compute_dtype: torch.dtype | None = None
    chunk_size: int | None = None
    micro_sequences: int = 1
    micro_batches: int = 1
    tied: bool = False
    checkpointing: str = "none"
    compiles: str = ""  # the backend: autograd of the graphs too is traced by `aot_eager` alone
    clips: bool = True
    head_dim: int = 8
    architecture: str = "llama"
    num_documents: int = 8


ZIGZAG = Ranks(sequence_data=2, layout="zigzag")
SP = Ranks(tensor=2, sequence_parallel=True)
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("simple"),
        Variant("bf16", fully_sharded=True, compute_dtype=torch.bfloat16, clips=False),
        Variant("ce4", chunk_size=8),
        Variant("ms4", micro_sequences=4),
        Variant("df4", micro_batches=4),
        Variant("dp2", Ranks(data=2)),
        Variant("sdp2", Ranks(sequence_data=2)),
        Variant("sdp2_zigzag", ZIGZAG),
        Variant("tp2", Ranks(tensor=2)),
        Variant("stp2", SP),
        Variant("tp2_novp", Ranks(tensor=2, vocabulary_parallel=False)),
        Variant("sdp2_tp2", Ranks(sequence_data=2, tensor=2)),
        Variant("sdp2_stp2", Ranks(sequence_data=2, tensor=2, sequence_parallel=True)),
        Variant("dp2_sdp2", Ranks(data=2, sequence_data=2, layout="zigzag")),
        Variant("fsdp2", Ranks(data=2), fully_sharded=True),
        Variant("fsdp2_backward", Ranks(data=2), True, "backward", micro_batches=2),
        Variant("fsdp2_update", Ranks(data=2), True, "update", micro_batches=2),
        Variant("fsdp2_tp2", Ranks(data=2, tensor=2, sequence_parallel=True), fully_sharded=True),
        # Combinations in which parts meet.
        Variant("stp2_novp", Ranks(tensor=2, sequence_parallel=True, vocabulary_parallel=False)),
        Variant("stp2_ms2", SP, micro_sequences=2),
        Variant("sdp2_zigzag_ms2", ZIGZAG, micro_sequences=2, checkpointing="full"),
        Variant("fsdp2_sdp2_ms2_df2", ZIGZAG, True, micro_sequences=2, micro_batches=2),
        Variant("fsdp2_update_ms2", ZIGZAG, True, "update", micro_sequences=2, micro_batches=2),
        Variant("mlp_stp2_ms2", SP, micro_sequences=2, checkpointing="attention"),
        Variant("mlp_fsdp2", Ranks(data=2), True, checkpointing="attention"),
        Variant("compiled_fsdp2", Ranks(data=2), True, checkpointing="full", compiles="aot_eager"),
        Variant("compiled_tp2", Ranks(tensor=2), tied=True, compiles="eager"),
        Variant("compiled_stp2", SP, checkpointing="attention", compiles="aot_eager"),
        Variant(
            "compiled_fsdp2_tp2",
            Ranks(data=2, tensor=2, sequence_parallel=True),
            True,
            checkpointing="attention",
            compiles="eager",
        ),
        Variant("compiled_ms2", ZIGZAG, micro_sequences=2, compiles="eager"),
        # The second data rank has no document.
        Variant("dp2_one_document", Ranks(data=2), num_documents=1),
        Variant("fsdp2_one_document", Ranks(data=2), fully_sharded=True, num_documents=1),
        Variant("tied_stp2", SP, tied=True),
        Variant("qwen3_stp2", SP, architecture="qwen3"),
        Variant("qwen2_tp2", Ranks(tensor=2), architecture="qwen2", tied=True),
        Variant("qwen3_sdp2_ms2", ZIGZAG, micro_sequences=2, architecture="qwen3"),
        Variant("qwen3_fsdp2_tp2", Ranks(data=2, tensor=2), True, architecture="qwen3"),
        Variant(
            "tied_stp2_novp",
            Ranks(tensor=2, sequence_parallel=True, vocabulary_parallel=False),
            tied=True,
        ),
        Variant(
            "tied_fsdp2_stp2",
            Ranks(sequence_data=2, tensor=2, sequence_parallel=True),
            fully_sharded=True,
            tied=True,
            checkpointing="full",
        ),
    )
}


@dataclass(frozen=True)
class Training:
    """What three steps gave: losses and metrics, gradients a step, weights at the end."""

    losses: list[float]
    metrics: list[dict[str, float]]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def documents(step: int) -> list[Document]:
    """Eight ragged documents; the old policy is near the first one, some advantages are zero."""
    generator = torch.Generator().manual_seed(50 + step)
    lengths = (9, 5, 14, 3, 7, 2, 11, 6)
    result = []
    for number, length in enumerate(lengths):
        prompt = 1 + number % 3 if length > 3 else 1
        old = -3.3 + 0.4 * torch.randn(length - prompt, generator=generator)
        result.append(
            Document(
                tokens=torch.randint(29, (length,), generator=generator).tolist(),
                prompt_length=prompt,
                logprobs=old.tolist(),
                advantage=(1.0, -0.7, 0.0, 1.5, -1.2, 0.4, 0.8, -0.5)[number],
            )
        )
    return result


def train(config_name: str, variant: Variant) -> Training | None:
    """Trains on this rank; rank 0 answers for all."""
    torch.manual_seed(11)
    # Drawn on the CPU, so that a GPU begins with the same weights.
    llama = Llama(variant_config(config_name, variant), dtype=torch.float32).to(rank_device())
    if variant.compiles:
        compile_layers(llama.model.layers, backend=variant.compiles)
    layout = variant.ranks
    groups = ParallelGroups()
    if layout.world_size > 1 or variant.fully_sharded:
        mesh = rank_mesh(layout.data, layout.sequence_data, layout.tensor)
        groups = parallelize_llama(
            llama,
            mesh,
            sequence_parallel=layout.sequence_parallel,
            fully_sharded=variant.fully_sharded,
            compute_dtype=variant.compute_dtype,
            reshard_after=variant.reshard_after,
        )
    optimizer = torch.optim.SGD(llama.parameters(), lr=LEARNING_RATE)
    losses, metrics, grads = [], [], []
    for step in range(NUM_STEPS):
        drawn = documents(step)[: variant.num_documents]
        outputs = forward_backward(llama, drawn, variant, groups)
        reduce_gradients(llama)
        totals = reduce_metrics(add_metrics(outputs), llama.lm_head.loss_groups)
        losses.append(totals["policy/loss"].item())
        metrics.append({name: value.item() for name, value in totals.items()})
        grads.append({name: whole(p.grad) for name, p in llama.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(p.detach()) for name, p in llama.named_parameters()}
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return Training(losses, metrics, grads, weights) if is_first else None


def variant_config(config_name: str, variant: Variant) -> LlamaConfig:
    overrides = [
        f"tie_word_embeddings={str(variant.tied).lower()}",
        f"activation_checkpointing={variant.checkpointing}",
        f"head.vocabulary_parallel={str(variant.ranks.vocabulary_parallel).lower()}",
    ]
    overrides += [f"head_dim={variant.head_dim}", f"architecture={variant.architecture}"]
    if not variant.clips:
        overrides += [f"head.losses.policy.epsilon_{side}=1.0" for side in ("low", "high")]
    if variant.chunk_size is not None:
        overrides.append(f"head.chunk_size={variant.chunk_size}")
    return load_config(LlamaConfig, CONFIGS / f"{config_name}.yaml", overrides)


def forward_backward(
    llama: Llama, step_documents: list[Document], variant: Variant, groups: ParallelGroups
) -> list[dict[str, Tensor]]:
    """The micro-batches of this data rank; metrics of each."""
    parts = group_size(groups.dp) * variant.micro_batches
    first = group_rank(groups.dp) * variant.micro_batches
    batches = [
        TokenBatch.from_documents(step_documents[part::parts], columns=COLUMNS)
        for part in range(first, first + variant.micro_batches)
    ]
    counts = BatchCounts.of(batches, groups)
    metrics = []
    for batch in batches:
        options = {"layout": variant.ranks.layout, "counts": counts, "device": rank_device()}
        pieces = batch.to_kwargs(groups, variant.micro_sequences, **options)  # type: ignore[arg-type]
        output: HeadOutput
        if variant.micro_sequences > 1:
            joined = batch.to_kwargs(groups, variant.micro_sequences, join=True, **options)  # type: ignore[arg-type]
            reshards = variant.reshard_after != "update"
            output = backward_in_pieces(llama, pieces, joined[0], reshards=reshards)
        else:
            output = llama(pieces[0])
            assert output.loss is not None
            output.loss.backward()
        assert output.loss is not None
        metrics.append({"policy/loss": output.loss.detach().double(), **output.metrics})
    return metrics


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()
