"""A causal language model of transformers as the trainer's model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from fastrl.config.base import UserError
from fastrl.config.transformers_model import TransformersModelConfig
from fastrl.data.batch import BatchKwargs
from fastrl.integrations.transformers.attach import attach_head
from fastrl.integrations.transformers.compiled import compile_layers
from fastrl.integrations.transformers.decoding import TransformersDecoder, check_decoding
from fastrl.integrations.transformers.folder import (
    ADAPTER_CONFIG_FILE,
    ModelFolder,
    load_folder,
    load_masters,
    persistent_buffers,
)
from fastrl.integrations.transformers.output_layer import Model
from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead
from fastrl.models.flops import TrainingFlops
from fastrl.models.parallelize import fully_shard_layers, reshard_all
from fastrl.parallel import ParallelGroups, all_reduce_tensors
from fastrl.training.model import FrozenPolicy, ModelFiles, ModelLimits
from fastrl.training.processes import Processes, sync_full_weights


@dataclass(frozen=True)
class Build:
    """How a model is made.

    Attributes:
        config: of the model.
        dtype: of parameters and optimizer states.
        samples: whether the run samples from it.
        checkpoint: folder to go on from, in place of the config's; None at the start.
    """

    config: TransformersModelConfig
    dtype: torch.dtype
    samples: bool
    checkpoint: Path | None = None

    @property
    def has_adapters(self) -> bool:
        return self.config.lora is not None

    @property
    def folder(self) -> Path:
        """Of the whole model, which a checkpoint of adapters has not."""
        if self.checkpoint is None or self.has_adapters:
            return Path(self.config.path)
        return self.checkpoint


class TransformersModel:
    """A model that the processes of a run share; a `TrainedModel`.

    It stays in evaluation mode, so that the policy that is trained is the one that samples: a
    dropout of the model's own is off. Adapters have theirs in the passes that are trained on.

    Args:
        build: how it is made; torch's global generator draws adapters.
        processes: of the run.

    Raises:
        UserError: as `load_folder`, `with_adapters`, `attach_head` and `check_decoding`.
    """

    def __init__(self, build: Build, processes: Processes) -> None:
        self._build = build
        self._processes = processes
        self._folder = ModelFolder(build.folder, build.dtype)
        self.groups = _groups(processes)
        self._inner = load_folder(build.folder, build.dtype)
        self._config = self._inner.config
        if build.checkpoint is not None and not build.has_adapters:
            load_masters(self._inner, build.checkpoint)
        self.module: Any = self._adapted(self._inner, build.checkpoint).to(processes.device)
        self.head = self._attached(self.module)
        self.limits = _limits(self._inner, self.head)
        self.flops = _flops(self._inner, self.head)
        self._is_static = False
        if build.samples:
            self._is_static = check_decoding(self._inner, self.limits.vocab_size)
        self._dropouts = [
            module
            for name, module in self.module.named_modules()
            if ".lora_dropout." in name and isinstance(module, nn.Dropout)
        ]
        if processes.compile_layers:
            compile_layers(self._compiled_layers())
        self._shard(self.module)

    def check_tensor_axis(self, size: int) -> None:
        assert size == 1, "the config refuses `parallel.tensor`"

    def backward(self, batch: BatchKwargs, *, return_logprobs: bool) -> HeadOutput:
        for dropout in self._dropouts:
            dropout.train()
        output: HeadOutput = self.module(batch=batch, return_logprobs=return_logprobs)
        for dropout in self._dropouts:
            dropout.eval()
        assert output.loss is not None
        output.loss.backward()
        return replace(output, loss=output.loss.detach())

    def backward_in_pieces(self, pieces: Sequence[BatchKwargs], joined: BatchKwargs) -> HeadOutput:
        raise AssertionError("the config refuses `parallel.micro_sequences`")

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        reshard_all(self.module)  # before its parameters are asked for: gathered ones have no sums
        trained = [each for each in self.module.parameters() if each.requires_grad]
        grads = []
        for parameter in trained:
            # Some have none, such as those of experts that no token chose: on this rank.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        if not isinstance(self.module, FSDPModule):
            all_reduce_tensors(grads, self.groups.dp)

    def logprobs(self, batch: BatchKwargs) -> Tensor:
        return _logprobs(self.module, batch)

    def frozen_copy(self) -> FrozenPolicy:
        if self._build.has_adapters:
            return _AdaptedPolicy(self.module)
        if not isinstance(self.module, FSDPModule):
            return _Policy(deepcopy(self.module).requires_grad_(False))
        copy = self._whole_copy(self._build.dtype)
        self._sync(copy)
        self._attached(copy)
        self._shard(copy)
        return _Policy(copy)

    def frozen(self) -> FrozenPolicy:
        """The model itself, which is not trained any more."""
        return _Policy(self.module.requires_grad_(False))

    def files(self) -> ModelFiles:
        if not self._build.has_adapters:
            return self._folder.files(self.module)
        from fastrl.integrations.transformers import adapters

        contents = {
            ADAPTER_CONFIG_FILE: adapters.adapter_config(self.module),
            **self._folder.contents_beside_adapters(),
        }
        return ModelFiles({adapters.ADAPTER_FILE: adapters.adapter_tensors(self.module)}, contents)

    def decoder(self) -> TransformersDecoder:
        """The model as the sampler calls it: itself, or a whole copy of one in shards."""
        whole = self.module
        if isinstance(whole, FSDPModule):
            whole = self._whole_copy(self._processes.compute_dtype or self._build.dtype)
        inner = whole.get_base_model() if self._build.has_adapters else whole

        def sync() -> None:
            if whole is not self.module:
                self._sync(whole)
            if not self._build.samples:  # not checked before
                decoder.is_static = check_decoding(inner, self.limits.vocab_size)

        decoder = TransformersDecoder(inner, sync, is_static=self._is_static)
        return decoder

    def _sync(self, copy: nn.Module) -> None:
        sync_full_weights(self.module, copy)

    def _adapted(self, inner: Model, checkpoint: Path | None) -> Any:
        """The model with the adapters that the config asks for, those of a checkpoint or new."""
        if self._build.config.lora is None:
            return inner
        from fastrl.integrations.transformers import adapters

        adapted = adapters.with_adapters(inner, self._build.config.lora, self._build.folder)
        if checkpoint is not None:
            adapters.load_adapters(adapted, checkpoint)
        return adapted.eval()

    def _attached(self, module: Any) -> LanguageModelHead:
        options = dict(self._build.config.head)
        for name in ("losses", "bias", "softcap", "logit_scale"):
            del options[name]
        try:
            return attach_head(module, {}, groups=self.groups, **options)
        except ValueError as error:
            raise UserError(f"{self._build.folder}: {error}") from error

    def _shard(self, module: Any) -> None:
        """FSDP2 over the data axis, if the run has it: a group for each layer."""
        mesh = self._processes.mesh
        if mesh is None or not self._processes.config.fully_sharded:
            return
        compute_dtype, config = self._processes.compute_dtype, self._processes.config
        layers = self._layers(module)
        fully_shard_layers(module, layers, mesh["data"], compute_dtype, config.reshard_after)

    def _layers(self, module: nn.Module) -> list[nn.Module]:
        """The layers that transformers does not split over devices: those of the decoder."""
        kinds = set(getattr(self._inner, "_no_split_modules", None) or ())
        return [each for each in module.modules() if type(each).__name__ in kinds]

    def _compiled_layers(self) -> list[nn.Module]:
        layers = self._layers(self.module)
        if not layers:
            raise UserError(
                f"compile: must be false with a {type(self._inner).__name__}, which does not say"
                " what its layers are (`_no_split_modules`)"
            )
        return layers

    def _whole_copy(self, dtype: torch.dtype) -> Any:
        """A model of the same parameters, not sharded, whose values are still to be copied."""
        with torch.random.fork_rng(devices=[]):  # made on the CPU
            inner = AutoModelForCausalLM.from_config(deepcopy(self._config), dtype=dtype)
            copy = self._adapted(inner.eval(), None).to(self._processes.device)
        buffers = dict(self.module.named_buffers())
        for name, buffer in persistent_buffers(copy).items():
            buffer.copy_(buffers[name])
        return copy.requires_grad_(False)


class _Policy:
    """A frozen copy; a `FrozenPolicy`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        parameters: Iterable[tuple[str, Tensor]] = self._module.named_parameters()
        return parameters

    def logprobs(self, batch: BatchKwargs) -> Tensor:
        return _logprobs(self._module, batch)


class _AdaptedPolicy:
    """The model with its adapters as they were; a `FrozenPolicy`."""

    def __init__(self, module: Any) -> None:
        from fastrl.integrations.transformers.adapters import FrozenAdapters

        self._module = module
        self._adapters = FrozenAdapters(module)

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._adapters.named_parameters()

    def logprobs(self, batch: BatchKwargs) -> Tensor:
        with self._adapters.in_place():
            return _logprobs(self._module, batch)


@torch.no_grad()
def _logprobs(module: Any, batch: BatchKwargs) -> Tensor:
    logprobs: Tensor = module(batch=batch, compute_loss=False).logprobs
    reshard_all(module)  # as a backward would: the update makes what is gathered stale
    return logprobs


def _groups(processes: Processes) -> ParallelGroups:
    return ParallelGroups() if processes.mesh is None else ParallelGroups.from_mesh(processes.mesh)


def _limits(inner: Model, head: LanguageModelHead) -> ModelLimits:
    rows = inner.get_input_embeddings().weight.shape[0]
    longest = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    return ModelLimits(min(rows, head.config.vocab_size), longest)


def _flops(inner: Model, head: LanguageModelHead) -> TrainingFlops:
    """The arithmetic, taking every matrix but the two of the vocabulary for one of the layers."""
    config = inner.config.get_text_config()
    ends = {id(inner.get_input_embeddings().weight), id(inner.get_output_embeddings().weight)}
    body = sum(p.numel() for p in inner.parameters() if p.ndim > 1 and id(p) not in ends)
    size = head.config.hidden_size
    num_layers = getattr(config, "num_hidden_layers", 1)
    return TrainingFlops(
        body=6.0 * body,
        attention=6.0 * num_layers * size,
        head=6.0 * size * head.config.vocab_size,
    )
