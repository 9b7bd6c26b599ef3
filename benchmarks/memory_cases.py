"""What `benchmarks.memory` measures: heads alone and training steps, with their estimates.

Also run without a GPU, on tensors without data, by tests/estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cases import SHAPES, Case
from benchmarks.ours import GRPO, GSPO, make_head
from fastrl.config import LlamaConfig
from fastrl.config.losses import LanguageModelHeadConfig
from fastrl.config.phases import OptimizerConfig
from fastrl.config.training import ParallelConfig
from fastrl.data.batch import BatchCounts, BatchKwargs, TokenBatch
from fastrl.data.documents import Document
from fastrl.estimate.head import HeadShape, Memory, head_ops, largest
from fastrl.estimate.memory import Step, peak
from fastrl.estimate.sizes import Shapes
from fastrl.models.llama import Llama
from fastrl.models.micro_sequences import backward_in_pieces
from fastrl.models.parallelize import parallelize_llama, reduce_gradients
from fastrl.parallel import ParallelGroups, device_mesh
from fastrl.training.optimizer import apply_update, build_optimizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_DOCUMENTS = 8
WHOLE = ParallelConfig()


@dataclass(frozen=True)
class HeadCase:
    """The head alone on a case of `benchmarks.cases`."""

    shape: str
    strategy: str
    loss: dict[str, Any]
    metrics: bool = False

    def config(self) -> LanguageModelHeadConfig:
        """The head's."""
        shape = SHAPES[self.shape]
        return LanguageModelHeadConfig.model_validate(
            {
                "hidden_size": shape.hidden_size,
                "vocab_size": shape.vocab_size,
                "losses": {"policy": self.loss},
                "strategy": self.strategy,
                "metrics": self.metrics,
            }
        )

    def estimate(self) -> tuple[str, list[Memory]]:
        """What the head is said to take above its inputs, gradients included."""
        shape = SHAPES[self.shape]
        active = shape.rows_active or shape.num_tokens
        labelled = shape.rows_labelled or shape.num_tokens
        rows = HeadShape(
            tokens=shape.num_tokens,
            slice=shape.num_tokens,
            labelled=labelled if self.metrics else active,
            active=active,
            columns=shape.vocab_size,
            hidden_size=shape.hidden_size,
            dtype=shape.dtype,
        )
        config = self.config()
        (op,) = head_ops(config, config.losses, rows)
        return op.what, [*largest(op.forward, [*op.kept, *op.backward])]


@dataclass(frozen=True)
class StepCase:
    """A training step of the reference Llama on one process, or on one of several."""

    model: LlamaConfig
    tokens: int
    parallel: ParallelConfig = WHOLE
    micro_batches: int = 1
    dtype: str = "float32"

    def estimate(self) -> tuple[str, list[Memory]]:
        """The moment of the peak, and what lives then."""
        return peak(
            Step(
                self.model,
                self.parallel,
                Shapes.of(self.parallel, self.tokens, self.dtype),
                self.model.head.losses,
                accumulates=self.micro_batches > 1,
            )
        )


def llama(sizes: dict[str, Any], *, checkpointing: bool = False, **head: Any) -> LlamaConfig:
    """A model with a GRPO loss; `sizes` may hold further fields."""
    options = {"losses": {"policy": {"type": "grpo"}}} | head
    return LlamaConfig.model_validate(
        {"activation_checkpointing": checkpointing, **sizes, "head": options}
    )


LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN_0_6B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
UNTIED = QWEN_0_6B | {"tie_word_embeddings": False}
BF16 = ParallelConfig(fully_sharded=True, compute_dtype="bfloat16")
PIECES = BF16.model_copy(update={"micro_sequences": 4})

HEADS = {
    "single_pass, one chunk": HeadCase("llama3-8b", "single_pass", GRPO),
    "single_pass, all rows": HeadCase("llama3-8b-all", "single_pass", GRPO),
    "single_pass, several chunks": HeadCase("llama3-8b-32k", "single_pass", GRPO),
    "GSPO, several chunks": HeadCase("llama3-8b-32k", "single_pass", GSPO),
    "recompute": HeadCase("llama3-8b", "recompute", GRPO),
    "recompute, metrics": HeadCase("llama3-8b-32k", "recompute", GRPO, metrics=True),
}
STEPS = {
    "1B, fp32": StepCase(llama(LLAMA_1B), 4096),
    "1B, fp32, checkpoints, two micro-batches": StepCase(
        llama(LLAMA_1B, checkpointing=True), 8192, micro_batches=2
    ),
    "1B, bf16": StepCase(llama(LLAMA_1B), 8192, BF16),
    "1B, bf16, recompute": StepCase(llama(LLAMA_1B, strategy="recompute"), 8192, BF16, 2),
    "1B, bf16, checkpoints": StepCase(llama(LLAMA_1B, checkpointing=True), 8192, BF16),
    "1B, bf16, checkpoints, two micro-batches": StepCase(
        llama(LLAMA_1B, checkpointing=True), 8192, BF16, 2
    ),
    "1B, bf16, pieces": StepCase(llama(LLAMA_1B), 16384, PIECES),
    "0.6B, fp32, recompute": StepCase(llama(QWEN_0_6B, strategy="recompute"), 4096),
    "0.6B, bf16, two micro-batches": StepCase(llama(QWEN_0_6B), 16384, BF16, 2),
    "0.6B, bf16, checkpoints": StepCase(llama(QWEN_0_6B, checkpointing=True), 16384, BF16),
    "0.6B, bf16, gathered once an update": StepCase(
        llama(QWEN_0_6B), 16384, BF16.model_copy(update={"reshard_after": "update"}), 2
    ),
    "0.6B, untied, fp32, two micro-batches": StepCase(llama(UNTIED), 4096, micro_batches=2),
    "0.6B, untied, bf16, checkpoints, pieces": StepCase(
        llama(UNTIED, checkpointing=True), 16384, PIECES
    ),
}


def head_step(case: HeadCase, batch: BatchKwargs, device: str) -> Callable[[], object]:
    """Loss and gradients of the head; inputs are allocated now."""
    shape = SHAPES[case.shape]

    def inputs(rows: int) -> Tensor:
        values = torch.empty(rows, shape.hidden_size, dtype=shape.dtype, device=device)
        return values.normal_(std=0.02).requires_grad_()

    hidden, weight = inputs(shape.num_tokens), inputs(shape.vocab_size)
    rows = batch.labelled_rows, batch.active_rows
    assert rows[0] is not None
    assert rows[1] is not None
    operands = Case(shape, hidden, weight, batch, rows[0].index, rows[1].index)
    head = make_head(operands, case.strategy, case.loss, case.metrics)
    head._parameters["weight"] = weight  # type: ignore[assignment]
    return lambda: torch.autograd.grad(head(hidden, batch).loss, (hidden, weight))


def new_mesh(parallel: ParallelConfig, device_type: str) -> DeviceMesh | None:
    """Of the default process group, as `fastrl.training.processes` makes it."""
    if parallel.num_processes == 1 and not parallel.fully_sharded:
        return None
    return device_mesh(
        data=parallel.data,
        sequence_data=parallel.sequence_data,
        tensor=parallel.tensor,
        device_type=device_type,
    )


def meta_llama(case: StepCase, mesh: DeviceMesh | None) -> Llama:
    """The model, spread, without memory."""
    model = Llama(case.model, device="meta", dtype=DTYPES[case.dtype])
    if mesh is not None:
        compute = case.parallel.compute_dtype
        parallelize_llama(
            model,
            mesh,
            sequence_parallel=case.parallel.sequence_parallel,
            fully_sharded=case.parallel.fully_sharded,
            compute_dtype=None if compute is None else DTYPES[compute],
            reshard_after=case.parallel.reshard_after,
        )
    return model


def step_batches(
    case: StepCase, groups: ParallelGroups
) -> tuple[tuple[BatchKwargs, ...], BatchKwargs]:
    """The pieces of a rank, and all of them as one, on the CPU."""
    length = case.tokens // NUM_DOCUMENTS
    documents = [
        Document(
            tokens=[1] * length,
            prompt_length=1,
            logprobs=[-1.0] * (length - 1),
            advantage=1.0,
        )
        for _ in range(NUM_DOCUMENTS)
    ]
    batch = TokenBatch.from_documents(documents)
    parallel, counts = case.parallel, BatchCounts.of([batch], groups)
    pieces, (whole,) = (
        batch.to_kwargs(
            groups,
            parallel.micro_sequences,
            layout=parallel.sequence_layout,
            join=join,
            counts=counts,
        )
        for join in (False, True)
    )
    return pieces, whole


def updates(
    case: StepCase, model: Llama, pieces: tuple[BatchKwargs, ...], whole: BatchKwargs
) -> Callable[[], None]:
    """One update of the trainer (`fastrl.training.phases`)."""
    config = OptimizerConfig(learning_rate=1e-6)
    optimizer = build_optimizer(model, config)

    def update() -> None:
        for _ in range(case.micro_batches):
            if len(pieces) > 1:
                reshards = case.parallel.reshard_after != "update"
                backward_in_pieces(model, pieces, whole, reshards=reshards)
                continue
            output = model(whole)
            output.loss.backward()
            del output
        reduce_gradients(model)
        apply_update(optimizer, config, 0, 1)

    return update
