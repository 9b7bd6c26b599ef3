"""A model of transformers as the sampler calls it: its own forward, with its own cache."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from fastrl.config.base import UserError
from fastrl.integrations.transformers.output_layer import Model, accepts

# Prompts by which the cache is tried: of different lengths, so that one is padded.
_LENGTHS = (9, 5)
# Nats by which fp32 arithmetic may move log-probabilities; a wrong position moves them by far more.
_TOLERANCE = 1e-3
_LOGGER = logging.getLogger(__name__)
# Steps between looks at how many sequences go on, where no shape asks for one.
_LOOK_EVERY = 256
_CACHES = ("cache", "past_key_values", "cache_params")


class Rows:
    """The cache of sequences that are padded on the left, which each token makes longer.

    Attributes:
        mask: [B, n] int64, 0 at padding.
        past: of the model; None before its first call.
    """

    def __init__(self, mask: Tensor, past: Any = None) -> None:
        self.mask = mask
        self.past = past
        self.length = 0

    @property
    def room(self) -> int:
        return 1

    def skip_to(self, length: int) -> None:
        raise AssertionError("no step is captured where each differs from the one before")

    def extend(self, num_tokens: int) -> Tensor:
        """The positions, [B, n], of `num_tokens` more slots."""
        self.length += num_tokens
        missing = self.length - self.mask.shape[1]
        if missing:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), missing)], 1)
        return (self.mask.cumsum(1)[:, -num_tokens:] - 1).clamp(min=0)

    def select(self, rows: Tensor) -> Self:
        self.mask = self.mask[rows]
        self.past.reorder_cache(rows)
        return self


class StaticRows(Rows):
    """As `Rows`, with all slots from the start: steps are alike.

    Attributes:
        mask: [B, n] int64, of all slots; the model hides those after a token.
    """

    def __init__(self, mask: Tensor, past: Any) -> None:
        super().__init__(mask, past)
        self._next = torch.zeros(1, dtype=torch.int64, device=mask.device)  # `length`

    @property
    def room(self) -> int:
        return min(_LOOK_EVERY, self.mask.shape[1] - self.length)

    def skip_to(self, length: int) -> None:
        self.length = length

    def extend(self, num_tokens: int) -> Tensor:
        self.length += num_tokens
        slots = self._next + torch.arange(num_tokens, device=self.mask.device)
        self._next += num_tokens
        return (self.mask.cumsum(1).index_select(1, slots) - 1).clamp(min=0)


class TransformersDecoder:
    """A model, or a whole copy of one in shards, for the sampler; a `Decoder`.

    Args:
        model: to sample from, in evaluation mode.
        sync: called before each batch of prompts, to copy the weights of what `model` is a copy of.
        is_static: whether the cache has all slots from the start, so that a GPU can repeat a step.
    """

    def __init__(
        self, model: Model, sync: Callable[[], None] = lambda: None, *, is_static: bool = False
    ) -> None:
        self._model = model
        self._sync = sync
        self.is_static = is_static
        names = inspect.signature(model.forward).parameters
        # What the cache is called as an argument and in the output.
        self._cache = next((name for name in _CACHES if name in names), _CACHES[0])
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1

    def sync(self) -> None:
        self._sync()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[Tensor, Rows]:
        longest = max(map(len, prompts))
        device = next(self._model.parameters()).device
        padding = [longest - len(prompt) for prompt in prompts]
        ids = [[0] * number + list(prompt) for number, prompt in zip(padding, prompts, strict=True)]
        slots = longest + (max_new_tokens if self.is_static else 0)
        kept = torch.arange(slots)[None] >= torch.tensor(padding)[:, None]
        mask = kept.long().to(device)
        cache = Rows(mask)
        if self.is_static:
            cache = StaticRows(mask, StaticCache(self._model.config, max_cache_len=slots))
        return self._logits(torch.tensor(ids, device=device), cache), cache

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Rows) -> Tensor:
        return self._logits(tokens, cache)

    def _logits(
        self,
        tokens: Tensor,  # [B, n]
        cache: Rows,
    ) -> Tensor:  # [B, V]
        options = dict(self._options)
        positions = cache.extend(tokens.shape[1])
        if accepts(self._model, "position_ids"):
            options["position_ids"] = positions
        options[self._cache] = cache.past
        output = self._model(input_ids=tokens, attention_mask=cache.mask, **options)
        cache.past = output[self._cache]
        logits: Tensor = output.logits[:, -1]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def check_decoding(model: Model, vocab_size: int) -> bool:
    """Refuses a model whose cache does not give what the model gives without one.

    Args:
        model: unsharded, in evaluation mode.
        vocab_size: ids are below it.

    Returns:
        Whether on its GPU a cache with all slots from the start gives it as well, in steps that
        never wait for the device.

    Raises:
        UserError: naming the model.
    """
    moved = _tried(model, vocab_size, is_static=False)
    if not moved <= _TOLERANCE:
        raise UserError(f"{_refusal(model)}; its log-probabilities differ by {moved:.2g} nats")
    if next(model.parameters()).device.type != "cuda" or not may_be_static(model):
        return False
    try:
        moved = _tried(model, vocab_size, is_static=True)
    except UserError as error:
        _LOGGER.warning("sampled without CUDA graphs: %s", error.__cause__)
        return False
    if not moved <= _TOLERANCE:
        _LOGGER.warning("sampled without CUDA graphs: log-probabilities differ by %.2g", moved)
    return moved <= _TOLERANCE


def may_be_static(model: Model) -> bool:
    """Whether transformers says that the model's steps can be alike, with slots for all tokens."""
    if not getattr(model, "_can_compile_fullgraph", False):
        return False
    layers = StaticCache(model.config, max_cache_len=1).layers
    # Layers of another class, such as those of a sliding window, branch on the length.
    return all(
        type(layer) is StaticLayer and isinstance(getattr(layer, "cumulative_length", None), Tensor)
        for layer in layers
    )


def _tried(model: Model, vocab_size: int, *, is_static: bool) -> float:
    """Nats by which decoding with a cache moves log-probabilities.

    Two prompts, one of which is padded, are decoded by one token, in another order and one of them
    twice.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS
    ]
    device = next(model.parameters()).device
    try:
        decoder = TransformersDecoder(model, is_static=is_static)
        _, cache = decoder.prefill([prompt[:-1] for prompt in prompts], 2)
        rows = torch.tensor([1, 0, 1], device=device)
        last = torch.tensor([[prompt[-1]] for prompt in prompts], device=device)[rows]
        cache = cache.select(rows)
        with _no_waits(is_static):
            found = decoder.decode(last, cache)
    except (
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(f"{_refusal(model)}; its call fails: {error}") from error
    alone = [model(input_ids=torch.tensor([each], device=device)).logits[0, -1] for each in prompts]
    expected = torch.stack(alone).double().log_softmax(-1)[rows]
    return float((found.double().log_softmax(-1) - expected).abs().max())


@contextmanager
def _no_waits(asked: bool) -> Iterator[None]:
    """Makes a wait for the device a RuntimeError, where it is asked for."""
    if asked:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode does not see every kind of wait
            torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if asked:
            torch.cuda.set_sync_debug_mode("default")


def _refusal(model: Model) -> str:
    return (
        f"the sampler needs a model that goes on from a cache of prompts padded on the left, but"
        f" {type(model).__name__} does not; train it on `rollouts` of type `files`, without an"
        " `environment`"
    )
