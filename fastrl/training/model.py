"""What the trainer needs of a model: one protocol, whatever the model is made of.

The reference Llama fulfils it by `fastrl.training.llama_model`, any causal language model of
transformers by `fastrl.integrations.transformers.trained`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor, nn

from fastrl.data.batch import BatchKwargs
from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead
from fastrl.models.flops import TrainingFlops
from fastrl.parallel import ParallelGroups


@dataclass(frozen=True)
class ModelLimits:
    """What documents of a model must keep to.

    Attributes:
        vocab_size: token ids are below it.
        max_position_embeddings: tokens of the longest document that the model is made for; None
            where it has no such bound.
        sliding_window: tokens that attention sees, where longer documents are not computed; None
            where they are.
    """

    vocab_size: int
    max_position_embeddings: int | None
    sliding_window: int | None = None


@dataclass(frozen=True)
class ModelFiles:
    """What a model has in a checkpoint's folder.

    Attributes:
        tensors: by file and by name in it, of the model's device and sharded as its parameters.
        contents: of the other files, by name.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    contents: Mapping[str, bytes]


class DecodingCache(Protocol):
    """What a model keeps of the sequences that are sampled.

    Attributes:
        length: slots of each sequence that are written, padding included.
        room: the number of next calls of `decode` that are alike: of the same shapes, on the same
            memory, without a wait for the device. 1 where each differs from the one before.
    """

    @property
    def length(self) -> int: ...

    @property
    def room(self) -> int: ...

    def skip_to(self, length: int) -> None:
        """Counts the slots that replays of a captured `decode` have written, `length` in all."""
        ...

    def select(self, rows: Tensor) -> Self:
        """The cache of these sequences, in this order, perhaps repeated; this one is spent."""
        ...


class Decoder(Protocol):
    """A model as the sampler calls it."""

    def sync(self) -> None:
        """Takes the weights of the trained model; all processes must call."""
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[Tensor, DecodingCache]:
        """[B, V] logits after each prompt, and a cache with room for `max_new_tokens`."""
        ...

    def decode(
        self,
        tokens: Tensor,  # [B, 1]
        cache: Any,
    ) -> Tensor:
        """[B, V] logits after `tokens`, at least fp32, without a temperature.

        Args:
            tokens: int64 ids, appended to the cache.
            cache: of `prefill`.
        """
        ...


class FrozenPolicy(Protocol):
    """The policy as it was, for a KL term."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """What a checkpoint must hold of it, sharded as the model's parameters of these names."""
        ...

    def logprobs(self, batch: BatchKwargs) -> Tensor:
        """[T] nats of the batch's labels."""
        ...


class TrainedModel(Protocol):
    """A model under training; all processes make the same calls.

    Attributes:
        module: its parameters, by the names that checkpoints have for them. Those that require no
            gradient stay as they are.
        head: the losses.
        groups: process groups of its batches.
        limits: of its documents.
        flops: arithmetic of a training step, by which packs and ranks are balanced.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def head(self) -> LanguageModelHead: ...

    @property
    def groups(self) -> ParallelGroups: ...

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def flops(self) -> TrainingFlops: ...

    def check_tensor_axis(self, size: int) -> None:
        """Refuses sizes of the model that leave some of the tensor axis's ranks without a part.

        Raises:
            ValueError: by the name of the size.
        """
        ...

    def backward(self, batch: BatchKwargs, *, return_logprobs: bool) -> HeadOutput:
        """The head's output without a graph; the gradients are added to the parameters'."""
        ...

    def backward_in_pieces(self, pieces: Sequence[BatchKwargs], joined: BatchKwargs) -> HeadOutput:
        """As `backward`, of a packed sequence in micro-sequences."""
        ...

    def reduce_gradients(self) -> None:
        """Sums the gradients of replicas, once a step after all backward passes."""
        ...

    def logprobs(self, batch: BatchKwargs) -> Tensor:
        """[T] nats of the batch's labels under the current weights."""
        ...

    def frozen_copy(self) -> FrozenPolicy:
        """The policy as it is now."""
        ...

    def files(self) -> ModelFiles:
        """The model as a folder that others load, without its tokenizer."""
        ...
