"""The contract of attention over packed documents.

An object of `LayerAttention` is made once per forward and holds no parameters. Each decoder layer
is given what `of_layer` returns and calls it as `attend(query, key, value)`: a layer does not know
its number, so that one compiled layer serves all. The projections and the rotary embedding are the
model's, `fastrl.models.llama`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor


class Attend(Protocol):
    """Causal attention of one layer; H query heads, K key-value heads, H a multiple of K."""

    def __call__(
        self,
        query: Tensor,  # [T, H, head_dim]
        key: Tensor,  # [T, K, head_dim]
        value: Tensor,  # [T, K, head_dim]
    ) -> Tensor:  # [T, H, head_dim]
        """softmax(query key^T / sqrt(head_dim)) value over what each token may see."""
        ...


class LayerAttention(Protocol):
    """Causal attention of all layers of one forward."""

    def of_layer(self, number: int) -> Attend:
        """That of a layer."""
        ...


class StatelessAttention:
    """Attention that is the same function in every layer."""

    def of_layer(self, number: int) -> Self:
        """Itself."""
        return self


@dataclass(frozen=True, eq=False)
class DocumentLengths:
    """What the host knows of the documents of a packed sequence.

    Attributes:
        number: of documents, at least.
        longest: tokens of the longest one, at least.
        visible_until: [T], of `BatchKwargs.host_visible_until`, where documents share slots.
    """

    number: int
    longest: int
    visible_until: Tensor | None = None
