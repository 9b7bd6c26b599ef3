"""The reference Llama as the trainer's model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastrl.data.batch import BatchKwargs
from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead
from fastrl.models.checkpoint import by_file, json_files, weight_files
from fastrl.models.flops import TrainingFlops
from fastrl.models.kv_cache import KVCache
from fastrl.models.llama import Llama
from fastrl.models.micro_sequences import backward_in_pieces
from fastrl.models.parallelize import check_tensor_axis, reduce_gradients, reshard_all
from fastrl.parallel import ParallelGroups
from fastrl.training.model import ModelFiles, ModelLimits
from fastrl.training.processes import Processes, frozen_copy, sync_full_weights

# A new graph costs about as much as 15 of its steps; attention reads half a block in vain.
_GPU_BLOCK = 256


class LlamaModel:
    """A Llama that the processes of a run share; a `TrainedModel`, and frozen a `FrozenPolicy`.

    Args:
        llama: sharded as the run says.
        processes: of the run.
    """

    def __init__(self, llama: Llama, processes: Processes) -> None:
        self.module = llama
        self._processes = processes

    @property
    def head(self) -> LanguageModelHead:
        return self.module.lm_head

    @property
    def groups(self) -> ParallelGroups:
        return self.module.groups

    @property
    def limits(self) -> ModelLimits:
        config = self.module.config
        assert config.vocab_size is not None, "a built model has a vocabulary"
        return ModelLimits(config.vocab_size, config.max_position_embeddings, config.sliding_window)

    @property
    def flops(self) -> TrainingFlops:
        return TrainingFlops.of(self.module.config)

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self.module.named_parameters()

    def check_tensor_axis(self, size: int) -> None:
        check_tensor_axis(self.module, size)

    def backward(self, batch: BatchKwargs, *, return_logprobs: bool) -> HeadOutput:
        output: HeadOutput = self.module(batch, return_logprobs=return_logprobs)
        assert output.loss is not None
        output.loss.backward()
        return replace(output, loss=output.loss.detach())

    def backward_in_pieces(self, pieces: Sequence[BatchKwargs], joined: BatchKwargs) -> HeadOutput:
        reshards = self._processes.config.reshard_after != "update"
        return backward_in_pieces(self.module, pieces, joined, reshards=reshards)

    def reduce_gradients(self) -> None:
        reduce_gradients(self.module)

    @torch.no_grad()
    def logprobs(self, batch: BatchKwargs) -> Tensor:
        was_training = self.module.training
        self.module.eval()
        logprobs: Tensor = self.module(batch).logprobs
        self.module.train(was_training)
        reshard_all(self.module)  # as a backward would: the update makes what is gathered stale
        return logprobs

    def frozen_copy(self) -> LlamaModel:
        return LlamaModel(frozen_copy(self.module, self._processes), self._processes)

    def files(self) -> ModelFiles:
        return llama_files(self.module)


def llama_files(llama: Llama) -> ModelFiles:
    """A Llama's folder in Hugging Face's format."""
    parameters = dict(llama.named_parameters())
    holders = weight_files(parameters)
    return ModelFiles(by_file(parameters, holders), json_files(llama, holders))


class LlamaDecoder:
    """A Llama as the sampler calls it: itself, or a whole copy of one in shards.

    A sharded model would gather all weights for each token.

    Args:
        llama: the model that is trained.
        processes: of the run.
        block_size: of the cache; default: 256 on a GPU, whose steps are then CUDA graphs, and 1
            elsewhere.
    """

    def __init__(
        self, llama: Llama, processes: Processes, *, block_size: int | None = None
    ) -> None:
        self._source = llama
        self.llama = llama if processes.mesh is None else processes.new_sampler_copy(llama)
        on_gpu = processes.device.type == "cuda"
        self._block_size = block_size or (_GPU_BLOCK if on_gpu else 1)

    def sync(self) -> None:
        if self.llama is not self._source:
            sync_full_weights(self._source, self.llama)

    def prefill(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[Tensor, KVCache]:
        return self.llama.prefill(prompts, max_new_tokens, block_size=self._block_size)

    def decode(self, tokens: Tensor, cache: KVCache) -> Tensor:
        return self.llama.decode(tokens, cache)
