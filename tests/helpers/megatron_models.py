"""Tiny models of Megatron-core, on a GPU or (with two of its calls replaced) on a CPU.

Run on ranks of their own: the replaced calls and Megatron's groups are the process's.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.peer_packages import peer_module

VOCABULARY, ROWS, LENGTH, WIDTH = 32, 2, 8, 16


@dataclass(frozen=True)
class MegatronCase:
    """What varies: tying, Megatron's sequence parallelism, its data parallelism's `main_grad`."""

    tied: bool = False
    sequence_parallel: bool = False
    main_grad: bool = False
    dtype: torch.dtype = torch.float64
    width: int = WIDTH
    vocabulary: int = VOCABULARY
    length: int = LENGTH


def start_megatron() -> torch.device:
    """Megatron's groups, with all ranks on the tensor axis; where there is no GPU, a CPU for it."""
    state = peer_module("megatron.core.parallel_state")
    random = peer_module("megatron.core.tensor_parallel.random")
    norms = peer_module("megatron.core.transformer.torch_norm")
    # torch's own, refused under sequence parallelism because nothing sums its gradient there.
    norms.WrappedTorchNorm.__new__ = _norm
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        cpu = torch.device("cpu")
        torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
        random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    if on_gpu:
        random.model_parallel_cuda_manual_seed(1)
    return torch.device("cuda" if on_gpu else "cpu")


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
    return torch.nn.LayerNorm(hidden_size, eps)


def make_megatron(case: MegatronCase, **options: Any) -> Any:
    """A `GPTModel`, inside Megatron's data parallelism where `main_grad` is asked for."""
    device = start_megatron()
    models = peer_module("megatron.core.models.gpt")
    specs = peer_module("megatron.core.models.gpt.gpt_layer_specs")
    configs = peer_module("megatron.core.transformer.transformer_config")
    distributed = peer_module("megatron.core.distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not installed with it
        config = configs.TransformerConfig(
            num_layers=1,
            hidden_size=case.width,
            num_attention_heads=2,
            tensor_model_parallel_size=dist.get_world_size(),
            sequence_parallel=case.sequence_parallel,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            init_method_std=0.3,
            **options,
        )
        torch.manual_seed(5)
        model = models.GPTModel(
            config,
            specs.get_gpt_layer_local_spec(),
            vocab_size=case.vocabulary,
            max_sequence_length=case.length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=case.tied,
        )
        model = model.to(device=device, dtype=case.dtype)
        if not case.main_grad:
            return model
        reduce_in_fp32 = case.dtype != torch.float64
        options_of_ddp = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=reduce_in_fp32
        )
        return distributed.DistributedDataParallel(config, options_of_ddp, model)


def megatron_inputs(case: MegatronCase) -> dict[str, Tensor]:
    """The keyword arguments of the model, the same on all ranks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, case.vocabulary, (ROWS, case.length), generator=generator)
    positions = torch.arange(case.length).repeat(ROWS, 1)
    mask = torch.triu(torch.ones(case.length, case.length, dtype=torch.bool), 1)[None, None]
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    return {name: value.to(device) for name, value in inputs.items()}


def megatron_labels(case: MegatronCase) -> Tensor:
    """[B, S] the next tokens; the last of a row has none."""
    labels = megatron_inputs(case)["input_ids"].roll(-1, dims=1)
    labels[:, -1] = -100
    return labels


def megatron_gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Gradients by parameter: `main_grad` under data parallelism, else `grad`."""
    has_main_grad = hasattr(model, "zero_grad_buffer")
    if has_main_grad:
        model.zero_grad_buffer()
    model.zero_grad()
    loss.backward()
    parameters = dict((model.module if has_main_grad else model).named_parameters())
    if has_main_grad:
        assert all(value.grad is None for value in parameters.values())
    return {
        name: (value.main_grad if has_main_grad else value.grad).clone()
        for name, value in parameters.items()
    }
