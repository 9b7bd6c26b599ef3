"""Items in random order, epoch after epoch, from a seed; the position is the only state."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class ShuffledItems(Generic[ItemT]):
    """Endless passes over items, each shuffled anew.

    Args:
        items: at least one.
        seed: determines the order, together with the number of the pass.
        position: items that were taken already.
    """

    def __init__(self, items: Sequence[ItemT], seed: Hashable, position: int = 0) -> None:
        assert items
        self._items = items
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []
        self.position = position

    def take(self, number: int) -> list[ItemT]:
        """The next items; an item repeats only where a pass ends between the two."""
        taken = self.following(self.position, number)
        self.position += number
        return taken

    def following(self, start: int, number: int) -> list[ItemT]:
        """The items from a position on, which are not taken by it."""
        found = []
        for position in range(start, start + number):
            epoch, place = divmod(position, len(self._items))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = list(range(len(self._items)))
                seeded(self._seed, epoch).shuffle(self._order)
            found.append(self._items[self._order[place]])
        return found


def seeded(*parts: Hashable) -> random.Random:
    """A random generator for a purpose, such as `seeded(run_seed, "phase", 3)`.

    Its numbers depend on the parts alone, so resuming a run needs no saved state.
    """
    return random.Random("/".join(map(str, parts)))
