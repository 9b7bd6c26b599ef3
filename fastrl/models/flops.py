"""The arithmetic of training on a document: what packs and ranks are balanced by."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.config.model import LlamaConfig


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations of forward and backward; a multiplication and an addition are two.

        body (n - s) + attention (n^2 - s^2) + head l    of a document of n tokens with l labels

    whose first s tokens stand in the packed sequence for another document.

    Attributes:
        body: of a token: 6 a weight of a matrix of the decoder layers.
        attention: of a squared length: 6 L H head_dim of L layers with H query heads, half of all
            pairs being causal.
        head: of a label: 6 a weight of the head.
    """

    body: float
    attention: float
    head: float

    @classmethod
    def of(cls, config: LlamaConfig) -> TrainingFlops:
        """The arithmetic of a model; embeddings and norms have none that counts."""
        size, head_dim = config.hidden_size, config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        projections = size * head_dim * (2 * heads + 2 * key_heads)
        layer = projections + 3 * size * config.intermediate_size
        assert config.vocab_size is not None, "a built model has a vocabulary"
        return cls(
            body=6.0 * config.num_hidden_layers * layer,
            attention=6.0 * config.num_hidden_layers * heads * head_dim,
            head=6.0 * size * config.vocab_size,
        )

    def document(self, num_tokens: int, num_labels: int, num_shared: int = 0) -> float:
        """Operations of one document, without those of the tokens that it shares."""
        body = self.body * (num_tokens - num_shared)
        return body + self.attention * (num_tokens**2 - num_shared**2) + self.head * num_labels
