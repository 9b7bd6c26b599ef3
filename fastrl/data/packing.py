"""Which documents share a packed sequence. Deterministic; documents are never cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fastrl.data.documents import Document, DocumentError
from fastrl.data.prefixes import Run, bundled_runs, single_runs


def pack_documents(
    documents: Sequence[Document],
    max_tokens: int,
    *,
    order: Literal["first_fit_decreasing", "in_order"] = "first_fit_decreasing",
    share_prefixes: bool = False,
) -> list[list[Document]]:
    """Documents in packs of at most `max_tokens` tokens, each document in exactly one pack.

    Losses are sums over tokens divided by counts of the whole step, so the packing changes no
    gradient, only the number of sequences and their padding.

    Args:
        documents: of at most `max_tokens` tokens each.
        max_tokens: of a pack, without padding.
        order: "first_fit_decreasing" puts each document, the longest first, into the first pack
            with room, which needs at most 11/9 of the fewest possible packs (and one more);
            "in_order" starts a new pack when the next document does not fit.
        share_prefixes: for `TokenBatch.from_documents(share_prefixes=True)`: the documents of a
            group stay in one pack, in which shared tokens take room once; a group that is larger
            than a pack is split, and what it shares takes room in each of its packs.

    Returns:
        Packs, none empty; inside a pack documents keep the order in which they were given.

    Raises:
        DocumentError: (a ValueError) for a document that is too long.
    """
    packs = pack_numbers(documents, max_tokens, order=order, share_prefixes=share_prefixes)
    return [[documents[number] for number in numbers] for numbers in packs]


def pack_numbers(
    documents: Sequence[Document],
    max_tokens: int,
    *,
    order: Literal["first_fit_decreasing", "in_order"] = "first_fit_decreasing",
    share_prefixes: bool = False,
) -> list[list[int]]:
    """As `pack_documents`, the 0-based numbers of the documents of each pack, increasing."""
    if order not in ("first_fit_decreasing", "in_order"):
        raise ValueError(f"`order` must be 'first_fit_decreasing' or 'in_order', got {order!r}")
    pack = first_fit_decreasing if order == "first_fit_decreasing" else _in_order
    bundles = bundles_of(documents, max_tokens, share_prefixes=share_prefixes)
    packs = pack([size_of(bundle) for bundle in bundles], max_tokens)
    return [sorted(run.number for number in some for run in bundles[number]) for some in packs]


def bundles_of(
    documents: Sequence[Document], max_tokens: int, *, share_prefixes: bool
) -> list[list[Run]]:
    """What stays together in a pack: each document by itself, or those that share tokens.

    Raises:
        DocumentError: for a document that is too long.
    """
    for number, document in enumerate(documents):
        if len(document.tokens) > max_tokens:
            got = len(document.tokens)
            problem = f"must have at most {max_tokens} entries (`max_tokens`), got {got}"
            raise DocumentError(number, "tokens", problem)
    return bundled_runs(documents, max_tokens) if share_prefixes else single_runs(documents)


def size_of(bundle: Sequence[Run]) -> int:
    """The tokens that a bundle takes room for."""
    return sum(run.num_tokens for run in bundle)


def _in_order(lengths: list[int], max_tokens: int) -> list[list[int]]:
    packs: list[list[int]] = []
    room = -1
    for number, length in enumerate(lengths):
        if length > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(number)
        room -= length
    return packs


def first_fit_decreasing(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """The numbers of each pack, by a tree of the largest room below each node: N log N for N."""
    num_leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [max_tokens] * (2 * num_leaves)
    packs: list[list[int]] = [[] for _ in lengths]
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        node = 1
        while node < num_leaves:
            node *= 2
            node += room[node] < lengths[number]
        packs[node - num_leaves].append(number)
        room[node] -= lengths[number]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(numbers) for numbers in packs if numbers]
