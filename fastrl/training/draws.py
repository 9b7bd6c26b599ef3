"""Completions of a batch while they are sampled: all that happens to them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.training.model import Decoder, DecodingCache


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        tokens: ids, with the end token that it stopped at if there is one.
        logprobs: nats, one a token, at the temperature of sampling; at temperature 0 those of
            temperature 1.
        finished: whether it ends with an end token.
        sum_squares: of the probabilities that each token was drawn from, where asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    sum_squares: list[float] | None = None


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn.

    Attributes:
        temperature: at least 0; 0 takes the most likely token.
        end_tokens: [E] int64.
        generator: source of randomness, on the model's device.
        sum_squares: whether completions have theirs.
    """

    temperature: float
    end_tokens: Tensor
    generator: torch.Generator
    sum_squares: bool


class Draws:
    """The completions of a batch, token by token. Nothing but `num_going_on` waits for the device.

    A sequence that has ended is drawn further, without effect, until `drop_finished`.

    Args:
        decoder: of the model.
        drawing: how tokens are drawn.
        cache: of the prompts, repeated for the completions of each.
        logits: [B, V] after each prompt, from which the first tokens are drawn.
        max_new_tokens: of a completion.
    """

    def __init__(
        self,
        decoder: Decoder,
        drawing: Drawing,
        cache: DecodingCache,
        logits: Tensor,  # [B, V]
        max_new_tokens: int,
    ) -> None:
        self._decoder, self._drawing = decoder, drawing
        self.cache = cache
        total, device = len(logits), logits.device
        shape = (total, max_new_tokens)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logprobs = logits.new_zeros(shape)
        self._squares = torch.zeros_like(self._logprobs) if drawing.sum_squares else None
        self._rows = torch.arange(total, device=device)  # of the sequences that are in the cache
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(total, dtype=torch.int64, device=device)
        self._going_on = torch.ones(total, dtype=torch.bool, device=device)
        self._draw(logits)

    def __len__(self) -> int:
        """Sequences that are in the cache."""
        return len(self._rows)

    def step(self) -> None:
        """Draws one more token of each sequence; in place, so that a CUDA graph can repeat it."""
        self._draw(self._decoder.decode(self._chosen[:, None], self.cache))

    def num_going_on(self) -> int:
        """Sequences that have not ended."""
        return int(self._going_on.sum())

    def drop_finished(self) -> None:
        """Moves the sequences that have not ended to a smaller cache."""
        kept = self._going_on.nonzero().squeeze(1)
        self._rows, self._chosen = self._rows[kept], self._chosen[kept]
        self._going_on = self._going_on[kept]
        self.cache = self.cache.select(kept)

    def _draw(
        self,
        logits: Tensor,  # [B, V]
    ) -> None:
        drawing = self._drawing
        # NaN throughout a row whose logits are not finite, and so is its token's log-probability.
        scaled = logits / drawing.temperature if drawing.temperature else logits
        distribution = scaled.log_softmax(-1)
        if drawing.temperature:
            # As torch.multinomial draws, which looks at all probabilities on the host before.
            race = torch.empty_like(distribution).exponential_(generator=drawing.generator)
            chosen = (distribution.exp() / race).argmax(-1, keepdim=True)
        else:
            chosen = distribution.argmax(-1, keepdim=True)
        logprobs = distribution.gather(1, chosen).squeeze(1)
        place = (self._rows, self._column)
        if self._squares is not None:
            self._squares[place] = (2 * distribution).exp().sum(-1)
        self._tokens[place] = chosen.squeeze(1)
        self._logprobs[place] = logprobs
        self._column += 1
        self._chosen.copy_(chosen.squeeze(1))
        self._going_on &= ~self._ends(self._chosen, logprobs)

    def _ends(
        self,
        tokens: Tensor,  # [...]
        logprobs: Tensor,  # [...]
    ) -> Tensor:  # [...]
        """Whether a completion ends with a token."""
        is_end = (tokens[..., None] == self._drawing.end_tokens).any(-1)
        return is_end | logprobs.isnan()

    def completions(self) -> list[Completion]:
        """All completions, each up to its first end."""
        ends = self._ends(self._tokens, self._logprobs)
        finished = ends.any(1)
        lengths = torch.where(finished, ends.int().argmax(1) + 1, ends.shape[1])
        columns = _on_host(self._tokens, self._logprobs, lengths, finished)
        sums: Sequence[list[float] | None] = [None] * len(ends)
        if self._squares is not None:
            (sums,) = _on_host(self._squares)
        return [
            Completion(
                row[:length],
                row_logprobs[:length],
                is_finished,
                None if row_sums is None else row_sums[:length],
            )
            for row, row_logprobs, length, is_finished, row_sums in zip(*columns, sums, strict=True)
        ]


def _on_host(*tensors: Tensor) -> list[list[Any]]:
    # numpy's tolist takes a tenth of the time of torch's.
    return [tensor.cpu().numpy().tolist() for tensor in tensors]
