"""A model of transformers as the sampler calls it: its own forward, with its own cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from fastrl.config.base import UserError
from fastrl.integrations.transformers.output_layer import Model, accepts

# Prompts by which the cache is tried: of different lengths, so that one is padded.
_LENGTHS = (9, 5)
# Nats by which fp32 arithmetic may move log-probabilities; a wrong position moves them by far more.
_TOLERANCE = 1e-3
_CACHES = ("cache", "past_key_values", "cache_params")


class Rows:
    """The cache of sequences that are padded on the left.

    Attributes:
        mask: [B, n] int64, 0 at padding.
        past: of the model; None before its first call.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.past: Any = None

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    @property
    def room(self) -> int:
        return 1  # each token makes the tensors longer

    def skip_to(self, length: int) -> None:
        raise AssertionError("no step is captured where each differs from the one before")

    def select(self, rows: Tensor) -> Self:
        self.mask = self.mask[rows]
        self.past.reorder_cache(rows)
        return self


class TransformersDecoder:
    """A model, or a whole copy of one in shards, for the sampler; a `Decoder`.

    Args:
        model: to sample from, in evaluation mode.
        sync: called before each batch of prompts, to copy the weights of what `model` is a copy of.
    """

    def __init__(self, model: Model, sync: Callable[[], None] = lambda: None) -> None:
        self._model = model
        self._sync = sync
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
        kept = torch.arange(longest)[None] >= torch.tensor(padding)[:, None]
        cache = Rows(kept.long().to(device))
        return self._logits(torch.tensor(ids, device=device), cache), cache

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Rows) -> Tensor:
        cache.mask = torch.cat([cache.mask, torch.ones_like(tokens)], 1)
        return self._logits(tokens, cache)

    def _logits(
        self,
        tokens: Tensor,  # [B, n]
        cache: Rows,
    ) -> Tensor:  # [B, V]
        options = dict(self._options)
        if accepts(self._model, "position_ids"):
            positions = cache.mask.cumsum(1)[:, -tokens.shape[1] :] - 1
            options["position_ids"] = positions.clamp(min=0)
        options[self._cache] = cache.past
        output = self._model(input_ids=tokens, attention_mask=cache.mask, **options)
        cache.past = output[self._cache]
        logits: Tensor = output.logits[:, -1]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def check_decoding(model: Model, vocab_size: int) -> None:
    """Refuses a model whose cache does not give what the model gives without one.

    Two prompts, one of which is padded, are decoded by one token, in another order and one of them
    twice.

    Args:
        model: unsharded, in evaluation mode.
        vocab_size: ids are below it.

    Raises:
        UserError: naming the model.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS
    ]
    device = next(model.parameters()).device
    try:
        decoder = TransformersDecoder(model)
        _, cache = decoder.prefill([prompt[:-1] for prompt in prompts], 1)
        rows = torch.tensor([1, 0, 1], device=device)
        last = torch.tensor([[prompt[-1]] for prompt in prompts], device=device)
        found = decoder.decode(last[rows], cache.select(rows)).double().log_softmax(-1)
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
    moved = float((found - expected).abs().max())
    if not moved <= _TOLERANCE:
        raise UserError(f"{_refusal(model)}; its log-probabilities differ by {moved:.2g} nats")


def _refusal(model: Model) -> str:
    return (
        f"the sampler needs a model that goes on from a cache of prompts padded on the left, but"
        f" {type(model).__name__} does not; train it on `rollouts` of type `files`, without an"
        " `environment`"
    )
