"""The key-value cache of sequences that are sampled: memory and attention whose shapes stay."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastrl.models.attend import Attend


class KVCache:
    """Keys and values of the tokens so far, of B sequences that end in the same slot.

    Prompts of different lengths are padded on the left, so that a step writes one slot for all
    sequences. Memory: 2 * layers * B * max_length * K * head_dim elements, taken at the first step,
    in the dtype and on the device of the model.

    Attention reads whole blocks of slots, those without a token masked. Within a block every step
    of one token has the same shapes, and the slot that it writes is counted on the device: it can
    be captured in a CUDA graph. Whoever replays one says so (`skip_to`), as the host counts too.

    Args:
        padding: [B] int64, number of padding slots before each sequence's first token.
        max_length: slots, the longest prompt and the new tokens together.
        block_size: slots of a block; 1 reads no slot without a token.

    Attributes:
        length: slots that are written.
    """

    def __init__(
        self,
        padding: Tensor,  # [B]
        max_length: int,
        block_size: int = 1,
    ) -> None:
        self.padding = padding
        self.max_length = max_length
        self.block_size = block_size
        self.length = 0
        self._keys: list[Tensor] = []  # a layer: [B, K, max_length, head_dim]
        self._values: list[Tensor] = []
        slot = torch.arange(max_length, device=padding.device)
        hidden = slot < padding[:, None]
        self._bias = torch.zeros(hidden.shape, device=padding.device)  # [B, max_length]
        self._bias.masked_fill_(hidden, float("-inf"))
        self._next = torch.zeros(1, dtype=torch.int64, device=padding.device)  # `length`
        # Of the call in progress: its slots, and what each of them sees.
        self._slots = self._next
        self._mask = self._bias

    @property
    def room(self) -> int:
        """Tokens that can be appended one by one, up to the end of the block, in equal shapes."""
        return self._end_of_block(self.length + 1) - self.length

    def _end_of_block(self, length: int) -> int:
        return min(-(-length // self.block_size) * self.block_size, self.max_length)

    def skip_to(self, length: int) -> None:
        """Counts the slots that replays of a captured step have written, `length` in all."""
        self.length = length
        self._slots, self._mask = self._next, self._bias  # not those of the graph's memory

    def extend(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """The positions in the sequences, [B, n], of `num_tokens` more slots, which it opens.

        Raises:
            ValueError: more slots than `max_length` are needed.
        """
        end = self.length + num_tokens
        if end > self.max_length:
            raise ValueError(
                f"`max_length` of the cache is {self.max_length} slots, got tokens for {end}; make "
                "the cache for the longest prompt and the new tokens together"
            )
        device = self.padding.device
        slots = self._next + torch.arange(num_tokens, device=device)
        self._next += num_tokens
        key_slot = torch.arange(self._end_of_block(end), device=device)
        mask = self._bias[:, None, : len(key_slot)]  # [B, 1, end]
        mask = mask.masked_fill(key_slot > slots[:, None], float("-inf"))
        mask = mask.masked_fill(key_slot == slots[:, None], 0.0)  # padding sees itself
        self._slots, self._mask = slots, mask.to(dtype)[:, None]  # [B, 1, n, end]
        self.length = end
        return (slots - self.padding[:, None]).clamp(min=0)

    def of_layer(self, number: int) -> Attend:
        """The attention of a layer, which stores its keys and values here."""
        return partial(self._attend, number)

    def _attend(
        self,
        layer: int,
        query: Tensor,  # [B * n, H, head_dim]
        key: Tensor,  # [B * n, K, head_dim]
        value: Tensor,  # [B * n, K, head_dim]
    ) -> Tensor:  # [B * n, H, head_dim]
        """The attention output of the new tokens, whose keys and values are stored."""
        batch, n, end = len(self.padding), len(self._slots), self._mask.shape[-1]
        heads, head_dim = key.shape[1:]
        if layer == len(self._keys):
            # Zeros: a probability of 0 times a slot that nothing was written to must be 0.
            shape = (batch, heads, self.max_length, head_dim)
            self._keys.append(key.new_zeros(shape))
            self._values.append(value.new_zeros(shape))
        for stored, new in ((self._keys, key), (self._values, value)):
            rows = new.view(batch, n, heads, head_dim).transpose(1, 2)
            stored[layer].index_copy_(2, self._slots, rows)
        keys, values = self._keys[layer][:, :, :end], self._values[layer][:, :, :end]
        # The query heads of one key head become query rows: faster on a CPU than `enable_gqa`.
        group = query.shape[1] // heads
        q = query.view(batch, n, heads, group, head_dim).transpose(1, 2).flatten(2, 3)
        mask = self._mask if n == 1 else self._mask.repeat_interleave(group, dim=2)
        output = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        output = output.view(batch, heads, n, group, head_dim).transpose(1, 2)
        return output.reshape(query.shape)

    def select(
        self,
        rows: Tensor,  # [B']
    ) -> KVCache:
        """A cache of the sequences `rows`: fewer (finished ones dropped) or repeated ones."""
        chosen = KVCache(self.padding[rows], self.max_length, self.block_size)
        chosen.length = self.length
        chosen._next.copy_(self._next)
        chosen._keys = [keys[rows] for keys in self._keys]
        chosen._values = [values[rows] for values in self._values]
        return chosen
