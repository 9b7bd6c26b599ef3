"""`KeptTokens`: recorded entries of the vocabulary for each label, as many as there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


# Not frozen, as `RowSet` says.
@dataclass(eq=False, kw_only=True)
class KeptTokens:
    """n entries of the vocabulary, each with the slot of T that it belongs to.

    Those that a sampler drew the label from, or a teacher's most probable ones. Memory is 16 bytes
    an entry and its log-probability, also where one slot has the whole vocabulary and others one
    entry.

    Attributes:
        ids: [n] int64 of the vocabulary.
        slots: [n] int64 from 0 to T - 1; -1 for an entry of a slot that is not there.
        num_slots: T.
        logprobs: [n] nats of the entries; None where they have none.
    """

    ids: Tensor  # [n]
    slots: Tensor  # [n]
    num_slots: int
    logprobs: Tensor | None = None  # [n]

    @classmethod
    def from_counts(
        cls,
        ids: Tensor,  # [n]
        counts: Tensor,  # [T]
        logprobs: Tensor | None = None,  # [n]
    ) -> KeptTokens:
        """The entries of the slots one after the other, each with its number of them."""
        slots = torch.arange(len(counts)).repeat_interleave(counts)
        return cls(ids=ids, slots=slots, num_slots=len(counts), logprobs=logprobs)

    @classmethod
    def from_padded(
        cls,
        entries: Tensor,  # [T, K]
        logprobs: Tensor | None = None,  # [T, K]
    ) -> KeptTokens:
        """The entries of each slot, filled up with -1; on their device, without waiting for it."""
        slots = torch.arange(len(entries), device=entries.device)[:, None]
        slots = torch.where(entries >= 0, slots, -1)
        values = None if logprobs is None else logprobs.flatten()
        return cls(
            ids=entries.flatten(), slots=slots.flatten(), num_slots=len(entries), logprobs=values
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are there, in the order in which `map` goes through them."""
        return [each for each in (self.ids, self.slots, self.logprobs) if each is not None]

    def lists(self) -> list[list[int]]:
        """The entries of each slot; waits for the device."""
        result: list[list[int]] = [[] for _ in range(self.num_slots)]
        for slot, entry in zip(self.slots.tolist(), self.ids.tolist(), strict=True):
            if slot >= 0:
                result[slot].append(entry)
        return result

    def map(self, function: Callable[[Tensor], Tensor]) -> KeptTokens:
        """The same entries with `function` applied to each of the tensors."""
        ids, slots, *rest = [function(each) for each in self.tensors]
        return replace(self, ids=ids, slots=slots, logprobs=rest[0] if rest else None)

    def padded(self, length: int) -> KeptTokens:
        """The same with slots without entries up to `length`."""
        return replace(self, num_slots=length)

    def __getitem__(
        self,
        index: Tensor | slice,  # [R]
    ) -> KeptTokens:
        """Those of R slots, each named once, which are 0 to R - 1 then.

        On a device the other entries stay, as no slot's: their number is not known on the host.
        """
        if isinstance(index, slice):
            index = torch.arange(self.num_slots, device=self.slots.device)[index]
        slots = self.places(index.to(self.slots.device), -1)[self.slots]
        selected = replace(self, slots=slots, num_slots=len(index))
        if not slots.is_cpu:
            return selected
        is_there = slots >= 0
        return selected.map(lambda values: values[is_there])

    def has_entry(self) -> Tensor:  # [T]
        """Whether a slot has any."""
        places = torch.where(self.slots >= 0, self.slots, self.num_slots)
        has = torch.zeros(self.num_slots + 1, dtype=torch.bool, device=self.slots.device)
        return has.index_fill_(0, places, True)[:-1]

    def places(self, index: Tensor, absent: int) -> Tensor:  # [R] -> [T + 1]
        """The place of each slot in `index`, and of slot -1; `absent` where it is not there."""
        places = index.new_full((self.num_slots + 1,), absent)
        places[index] = torch.arange(len(index), device=index.device)
        places[-1] = absent
        return places
