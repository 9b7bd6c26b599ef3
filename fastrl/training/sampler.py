"""The built-in sampler: batches of completions with the model's key-value cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastrl.config.base import UserError
from fastrl.config.environment import SamplerConfig
from fastrl.training.cuda_graph import repeated
from fastrl.training.draws import Completion, Drawing, Draws
from fastrl.training.model import Decoder
from fastrl.training.processes import Processes

_COMPACT_BELOW = 0.75
"""Unfinished sequences move to a smaller cache when they are fewer than this share."""

ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Not cuDNN's kernels, a new one of which is built for each length and number of sequences."""

_LOOK_EVERY = 16
"""Steps that are alike run without a look at whether all sequences have ended."""


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
        drawing = Drawing(temperature, self._end_tokens, self._generator, sum_squares)
        mine: list[list[Completion]] = []
        for number, start in enumerate(range(0, len(prompts), per_batch)):
            if number % processes.size != processes.rank:
                continue
            if number > 0:
                # A seed per batch: the result does not depend on which process samples it.
                self._generator.manual_seed(seed + number)
            batch = prompts[start : start + per_batch]
            with sdpa_kernel(ATTENTION):
                mine.append(self._sample_batch(batch, num_each, drawing))
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
        self, prompts: Sequence[Sequence[int]], num_each: int, drawing: Drawing
    ) -> list[Completion]:
        max_new_tokens = self.config.max_new_tokens
        logits, cache = self._decoder.prefill(prompts, max_new_tokens)
        if num_each > 1:
            rows = torch.arange(len(prompts), device=logits.device).repeat_interleave(num_each)
            logits, cache = logits[rows], cache.select(rows)
        draws = Draws(self._decoder, drawing, cache, logits, max_new_tokens)
        del logits, cache
        number = 1
        while number < max_new_tokens:
            num_going_on = draws.num_going_on()
            if num_going_on == 0:
                break
            if num_going_on < _COMPACT_BELOW * len(draws):
                draws.drop_finished()
            number += self._steps(draws, min(draws.cache.room, max_new_tokens - number))
        return draws.completions()

    def _steps(self, draws: Draws, most: int) -> int:
        """Draws `most` tokens of each sequence by steps that are alike, and returns how many.

        They are fewer if all sequences end before.
        """
        draws.step()
        if most == 1:
            return 1
        done, start = 1, draws.cache.length
        with repeated(draws.step, self._generator) as step:
            while done < most and (done % _LOOK_EVERY or draws.num_going_on()):
                step()
                done += 1
            # Here, where what the cache holds of the capture's memory can still go back to it.
            draws.cache.skip_to(start + done - 1)
        return done
