"""The built-in sampler: batches of completions with the model's key-value cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.config.base import UserError
from fastrl.config.environment import SamplerConfig
from fastrl.training.model import Decoder
from fastrl.training.processes import Processes

_COMPACT_BELOW = 0.75
"""Unfinished sequences move to a smaller cache when they are fewer than this share."""


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


class Sampler:
    """The sampler of completions of token prompts.

    Args:
        config: bounds of length and of batch size.
        decoder: of the model; each call samples from its current weights.
        end_tokens: ids; a completion ends with the first of any of them.
        generator: source of randomness, on the model's device.
        processes: that share the batches; all must call `sample` with the same arguments.
    """

    def __init__(
        self,
        config: SamplerConfig,
        decoder: Decoder,
        end_tokens: Sequence[int],
        generator: torch.Generator,
        processes: Processes,
    ) -> None:
        self.config = config
        self._processes = processes
        self._decoder = decoder
        self._end_tokens = torch.tensor(end_tokens, device=generator.device)
        self._generator = generator

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_each: int = 1,
        temperature: float = 1.0,
        sum_squares: bool = False,
    ) -> list[list[Completion]]:
        """`num_each` completions of each prompt.

            p(token) = softmax(logits / temperature); the most likely token at temperature 0

        Args:
            prompts: token ids, none empty.
            num_each: completions of a prompt.
            temperature: at least 0.
            sum_squares: whether completions have theirs.

        Raises:
            UserError: on all processes, if logits of any are not finite.
        """
        self._decoder.sync()
        per_batch = max(1, self.config.max_batch_size // num_each)
        seed = self._generator.initial_seed()
        processes = self._processes
        mine: list[list[Completion]] = []
        for number, start in enumerate(range(0, len(prompts), per_batch)):
            if number % processes.size != processes.rank:
                continue
            if number > 0:
                # A seed per batch: the result does not depend on which process samples it.
                self._generator.manual_seed(seed + number)
            batch = prompts[start : start + per_batch]
            mine.append(self._sample_batch(batch, num_each, temperature, sum_squares))
        shares = processes.gather(mine)
        num_batches = sum(map(len, shares))
        flat = [
            completion
            for number in range(num_batches)
            for completion in shares[number % processes.size][number // processes.size]
        ]
        if any(math.isnan(sum(completion.logprobs)) for completion in flat):
            raise UserError(
                f"sampler: the model's logits, divided by the temperature {temperature:g}, must be "
                "finite, are not; look for weights that are not finite (a lower "
                "`optimizer.learning_rate` keeps them so) or a temperature too small for its dtype "
                "(0 takes the most likely token)"
            )
        return [flat[i : i + num_each] for i in range(0, len(flat), num_each)]

    @torch.no_grad()
    def _sample_batch(
        self,
        prompts: Sequence[Sequence[int]],
        num_each: int,
        temperature: float,
        sum_squares: bool,
    ) -> list[Completion]:
        max_new_tokens = self.config.max_new_tokens
        logits, cache = self._decoder.prefill(prompts, max_new_tokens)
        if num_each > 1:
            rows = torch.arange(len(prompts), device=logits.device).repeat_interleave(num_each)
            logits, cache = logits[rows], cache.select(rows)
        total = len(logits)
        running = torch.arange(total, device=logits.device)
        tokens = torch.zeros((total, max_new_tokens), dtype=torch.int64, device=logits.device)
        logprobs = logits.new_zeros((total, max_new_tokens))
        squares = torch.zeros_like(logprobs) if sum_squares else None
        lengths = torch.full((total,), max_new_tokens, device=logits.device)
        done = torch.zeros(total, dtype=torch.bool, device=logits.device)
        for step in range(max_new_tokens):
            # NaN throughout a row whose logits are not finite, and so is its token's
            # log-probability.
            distribution = (logits / temperature if temperature else logits).log_softmax(-1)
            chosen, chosen_logprobs = self._choose(distribution, temperature)
            if squares is not None:
                squares[running, step] = (2 * distribution).exp().sum(-1)
            tokens[running, step] = chosen
            logprobs[running, step] = chosen_logprobs
            is_last = torch.isin(chosen, self._end_tokens) | chosen_logprobs.isnan()
            ends = is_last & ~done[running]
            lengths[running[ends]] = step + 1
            done[running[ends]] = True
            going_on = ~done[running]
            num_going_on = int(going_on.sum())
            if num_going_on == 0 or step + 1 == max_new_tokens:
                break
            if num_going_on < _COMPACT_BELOW * len(running):
                kept = going_on.nonzero().squeeze(1)
                running, chosen, cache = running[kept], chosen[kept], cache.select(kept)
            logits = self._decoder.decode(chosen[:, None], cache)
        # numpy's tolist takes a tenth of the time of torch's.
        columns = [column.cpu().numpy().tolist() for column in (tokens, logprobs, lengths, done)]
        sums = [None] * total if squares is None else squares.cpu().numpy().tolist()
        return [
            Completion(
                row[:length],
                row_logprobs[:length],
                finished,
                None if row_sums is None else row_sums[:length],
            )
            for row, row_logprobs, length, finished, row_sums in zip(*columns, sums, strict=True)
        ]

    def _choose(
        self,
        distribution: Tensor,  # [B, V] nats
        temperature: float,
    ) -> tuple[Tensor, Tensor]:  # [B] int64, [B] nats
        if temperature:
            probabilities = distribution.exp().nan_to_num_(nan=1.0)  # multinomial refuses NaN
            chosen = torch.multinomial(probabilities, 1, generator=self._generator)
        else:
            chosen = distribution.argmax(-1, keepdim=True)
        return chosen.squeeze(1), distribution.gather(1, chosen).squeeze(1)
