"""Configs of the head and of its losses."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fastrl.config.base import Config

Normalisation = Literal["tokens", "documents", "constant"]


class LossConfig(Config):
    """What every loss shares."""

    weight: float = 1.0
    """Factor on this loss in the sum over the head's losses."""

    normalisation: Normalisation = "tokens"
    """`tokens`: sum / labels in the batch. `documents`: each document's token mean / documents in
    the batch. `constant`: sum / (documents in the batch * `length`), as in Dr. GRPO."""

    length: int | None = Field(default=None, gt=0)
    """Tokens a document counts as under `normalisation: constant`, for example the completion
    limit; only there."""

    @model_validator(mode="after")
    def _length_belongs_to_constant(self) -> "LossConfig":
        if (self.length is not None) != (self.normalisation == "constant"):
            raise ValueError(
                "`length` must be given with `normalisation: constant` and only there, got"
                f" `length: {self.length}` with `normalisation: {self.normalisation}`"
            )
        return self


class CrossEntropyLossConfig(LossConfig):
    """Cross-entropy of the labels: supervised training."""

    type: Literal["cross_entropy"] = "cross_entropy"
    """Names the loss."""


class PolicyGradientLossConfig(LossConfig):
    """What every policy-gradient loss with a clipped importance ratio shares."""

    epsilon_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped from below at 1 - `epsilon_low`."""

    epsilon_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped from above at 1 + `epsilon_high`; larger than `epsilon_low` is DAPO's
    clip-higher."""


class GRPOLossConfig(PolicyGradientLossConfig):
    """Clipped surrogate of token ratios (GRPO, arXiv:2402.03300)."""

    type: Literal["grpo"] = "grpo"
    """Names the loss."""


class GSPOLossConfig(PolicyGradientLossConfig):
    """Clipped surrogate of a document's length-normalised ratio (GSPO, arXiv:2507.18071)."""

    type: Literal["gspo"] = "gspo"
    """Names the loss."""

    normalisation: Normalisation = "documents"
    """As in the other losses; the paper weighs each document once."""

    epsilon_low: float = Field(default=3e-4, ge=0, le=1)
    """The ratio is clipped from below at 1 - `epsilon_low`; the paper's value."""

    epsilon_high: float = Field(default=4e-4, ge=0)
    """The ratio is clipped from above at 1 + `epsilon_high`; the paper's value."""


AnyLossConfig = Annotated[
    CrossEntropyLossConfig | GRPOLossConfig | GSPOLossConfig, Field(discriminator="type")
]


class HeadOptions(Config):
    """The head of a model whose sizes are given elsewhere."""

    losses: dict[str, AnyLossConfig] = Field(default_factory=dict)
    """The losses by name; their weighted sum is the head's loss, their names prefix the metrics."""

    bias: bool = False
    """Whether the head adds a bias to its logits."""

    softcap: float | None = Field(default=None, gt=0)
    """Bound of the logits, softcap * tanh(logits / softcap) (Gemma); none by default."""

    logit_scale: float = 1.0
    """Factor on the logits, before the cap."""

    strategy: Literal["auto", "recompute", "single_pass"] = "auto"
    """`recompute`: logits a second time in the backward, any loss. `single_pass`: loss and
    gradients chunk by chunk, logits once. `auto`: `single_pass` where the loss and
    `max_logits_bytes` permit it."""

    chunk_size: int | None = Field(default=None, gt=0)
    """Most rows of logits that may exist at a time; bounded by `max_logits_bytes` alone by
    default."""

    max_logits_bytes: int = Field(default=9 * 2**28, gt=0)
    """Most bytes of logits that may exist at a time."""

    vocabulary_parallel: bool = True
    """Whether the weight's rows are sharded over the tensor axis; otherwise it is replicated."""

    metrics: bool = True
    """Whether the losses' metrics (ratio, clip fractions, entropy, ...) are computed. Without
    them, tokens of zero advantage do not enter the head at all."""


class LanguageModelHeadConfig(HeadOptions):
    """A language-model head: hidden states in, loss and gradients out."""

    hidden_size: int = Field(gt=0)
    """Size D of the hidden states."""

    vocab_size: int = Field(gt=0)
    """Entries V of the vocabulary."""

    padded_vocab_size: int | None = Field(default=None, gt=0)
    """Rows of the weight, where more than `vocab_size`; the rest is no part of the softmax."""

    @model_validator(mode="after")
    def _padding_is_not_negative(self) -> "LanguageModelHeadConfig":
        if self.padded_vocab_size is not None and self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"`padded_vocab_size` must be at least `vocab_size`, {self.vocab_size}, got"
                f" {self.padded_vocab_size}"
            )
        return self
