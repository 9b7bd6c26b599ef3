"""The reference Llama's config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from fastrl.config.base import Config
from fastrl.config.losses import DEFAULT_INITIALIZER_RANGE, HeadOptions
from fastrl.config.rope import DefaultRopeConfig, RopeConfig

TokenId = Annotated[int, Field(ge=0)]


AttentionImplementation = Literal["auto", "per_document", "flex", "varlen", "flash4"]

WHOLE_DOCUMENTS = ("varlen", "flash4")
"""Implementations that take the tokens of a document as one run."""


Recomputed = Literal["none", "attention", "full"]


def _of_flag(value: Recomputed | bool) -> Recomputed:
    """The checkpointing that a boolean stands for."""
    if isinstance(value, bool):
        return "full" if value else "none"
    return value


ActivationCheckpointing = Annotated[Recomputed | bool, AfterValidator(_of_flag)]


Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]

# Options that an architecture does not leave open.
FIXED_OPTIONS: dict[Architecture, dict[str, Any]] = {
    "llama": {"sliding_window": None},
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"attention_bias": True, "mlp_bias": False},
    "qwen3": {"mlp_bias": False},
}


class LlamaConfig(Config):
    """Architecture of the reference Llama; names and defaults follow Hugging Face's LlamaConfig.

    The default sizes are those of a small model that trains on a CPU.
    """

    type: Literal["llama"] = "llama"

    architecture: Architecture = "llama"
    """Which of the models that differ in little, by Hugging Face's `model_type`. `mistral`: may
    have a sliding window. `qwen2`: biases of the query, key and value projections, may have a
    window. `qwen3`: RMSNorm of every head's query and key, may have a window."""

    vocab_size: int | None = Field(default=None, gt=0, le=2**24)
    """Number of token ids. None: the trainer takes the tokenizer's; a model cannot be built from a
    config where it is still None."""

    padded_vocab_size: int | None = Field(default=None, gt=0, le=2**24)
    """Rows of the embedding and of the head, when more than `vocab_size`: the rest is padding,
    which no probability goes to."""

    hidden_size: int = Field(default=128, gt=0, le=2**20)
    """Width of the residual stream."""

    intermediate_size: int = Field(
        default_factory=lambda config: -(-8 * config["hidden_size"] // (3 * 32)) * 32,
        gt=0,
        le=2**22,
    )
    """Width of the gated MLP. Default: 8/3 of `hidden_size`, rounded up to a multiple of 32."""

    num_hidden_layers: int = Field(default=4, gt=0, le=10_000)
    """Number of decoder layers."""

    num_attention_heads: int = Field(default=4, gt=0, le=2**20)
    """Number of query heads."""

    num_key_value_heads: int = Field(
        default_factory=lambda config: config["num_attention_heads"], gt=0, le=2**20
    )
    """Number of key and value heads, a divisor of `num_attention_heads` (grouped-query attention).
    Default: `num_attention_heads`."""

    head_dim: int = Field(
        default_factory=lambda config: config["hidden_size"] // config["num_attention_heads"],
        gt=0,
        le=2**20,
    )
    """Size of one head, even. Default: hidden_size / num_attention_heads."""

    max_position_embeddings: int = Field(default=2048, gt=0)
    """Tokens of the longest document that the model is made for. `fastrl train` refuses longer
    ones; the model itself refuses no position. Written to config.json for other programs."""

    rms_norm_eps: float = Field(default=1e-5, gt=0, le=1)
    """Added to the mean square in RMSNorm."""

    rope: RopeConfig = DefaultRopeConfig()
    """Rotary position embedding."""

    sliding_window: int | None = Field(default=None, gt=0)
    """Tokens that a token attends to, itself among them, in `mistral`, `qwen2` and `qwen3`. Longer
    documents are refused: up to the window it changes nothing. None: whole documents."""

    attention_bias: bool = Field(default_factory=lambda config: config["architecture"] == "qwen2")
    """Whether the four projections of attention have a bias (`qwen2`: all but the output's, and
    always). Default: in `qwen2`."""

    mlp_bias: bool = False
    """Whether the three projections of the MLP have a bias; in `llama` only."""

    tie_word_embeddings: bool = False
    """Whether the head's weight is the embedding's, one parameter."""

    initializer_range: float = Field(default=DEFAULT_INITIALIZER_RANGE, ge=1e-6, le=100)
    """Standard deviation of the normal distribution that weights start from."""

    attention_implementation: AttentionImplementation = "auto"
    """How packed documents are kept apart. `per_document`: SDPA on documents of similar length,
    padded to one length, any device. `flex`: FlexAttention with a block mask, CUDA only. `varlen`:
    FlashAttention over documents of any lengths, CUDA and 16 bits only, faster by a third, and not
    the same to the bit from run to run. `flash4`: the same by FlashAttention 4, on Hopper or
    Blackwell with the flash-attn-4 package. `auto`: `flex` on CUDA (but not in float64, which it
    lacks), else `per_document`."""

    activation_checkpointing: ActivationCheckpointing = "none"
    """What a decoder layer recomputes in backward instead of keeping it. `attention`: the MLP is
    recomputed, what attention computed is kept. `full`: all but the layer's input is recomputed;
    `true` stands for it, and `false` for `none`."""

    bos_token_id: int | None = Field(default=None, ge=0)
    """Id of the token that begins a text. Written to config.json for other programs."""

    eos_token_id: TokenId | tuple[TokenId, ...] | None = None
    """Id (or ids) of the token that ends a text. Written to config.json for other programs."""

    pad_token_id: int | None = None
    """Id of the padding token. Written to config.json for other programs; here padding is by
    length, never by id."""

    head: HeadOptions = HeadOptions()
    """The language-model head: its losses and how it computes them."""

    @property
    def attention_output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias and self.architecture != "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether every head's query and key pass an RMSNorm before their rotation."""
        return self.architecture == "qwen3"

    @model_validator(mode="after")
    def _check_architecture(self) -> LlamaConfig:
        for name, value in FIXED_OPTIONS[self.architecture].items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"`{name}` must be {value} with `architecture` {self.architecture!r}, got "
                    f"{getattr(self, name)}"
                )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> LlamaConfig:
        if "head_dim" not in self.model_fields_set and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"`hidden_size` {self.hidden_size} must be a multiple of `num_attention_heads` "
                f"{self.num_attention_heads} unless `head_dim` is given"
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even (rotary pairs), got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` {self.num_attention_heads} must be a multiple of "
                f"`num_key_value_heads` {self.num_key_value_heads}"
            )
        if self.padded_vocab_size is not None and self.padded_vocab_size < (self.vocab_size or 0):
            raise ValueError(
                f"`padded_vocab_size` {self.padded_vocab_size} must be at least `vocab_size` "
                f"{self.vocab_size}"
            )
        return self
