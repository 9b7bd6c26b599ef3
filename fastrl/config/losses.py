"""Configs of the head and of its losses. What losses share is in `loss_options.py`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from fastrl.config.base import Config
from fastrl.config.covariance_losses import ClipCovLossConfig, KLCovLossConfig
from fastrl.config.loss_options import HIGHEST_RATIO, LossConfig
from fastrl.config.policy_losses import (
    CISPOLossConfig,
    DPPOLossConfig,
    GMPOLossConfig,
    GRPOLossConfig,
    GSPOLossConfig,
    GSPOTokenLossConfig,
    LUSPOLossConfig,
    ReinforceLossConfig,
    SAPOLossConfig,
    VESPOLossConfig,
)
from fastrl.config.user_losses import UserLossConfig, loss_tag

# Most bytes of logits that exist at a time, where nothing else is asked for: 2.25 GiB.
DEFAULT_MAX_LOGITS_BYTES = 9 * 2**28
# Standard deviation of a new head's weight, and of a new model's.
DEFAULT_INITIALIZER_RANGE = 0.02


class CrossEntropyLossConfig(LossConfig):
    """Cross-entropy of the labels: supervised training."""

    type: Literal["cross_entropy"] = "cross_entropy"
    """Names the loss."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target that is spread evenly over the vocabulary."""


class ZLossConfig(LossConfig):
    """Square of the log-sum-exp of the logits: keeps them from drifting (PaLM, ST-MoE)."""

    type: Literal["z_loss"] = "z_loss"
    """Names the loss."""

    weight: float = Field(default=1e-4, ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)
    """Factor on this loss in the sum over the head's losses; PaLM's value."""


class SquaredLogRatioLossConfig(LossConfig):
    """Square of the log-ratio of policy to behaviour policy (arXiv:2501.12599, arXiv:2405.19107).

    It has no advantages: the loss of Kimi k1.5 and DRO is `reinforce` beside it.
    """

    type: Literal["squared_log_ratio"] = "squared_log_ratio"
    """Names the loss."""

    behaviour: Literal["old", "rollout"] = "old"
    """Whose log-probabilities: `old_logprobs`, or the sampler's `rollout_logprobs`."""

    level: Literal["token", "document"] = "token"
    """Whether each token's log-ratio is squared, or the sum over its document."""

    def required_columns(self) -> frozenset[str]:
        """The behaviour policy."""
        return super().required_columns() | {f"{self.behaviour}_logprobs"}


class PositiveNLLLossConfig(LossConfig):
    """Negative log-likelihood of the labels with an advantage above 0 (VAPO, arXiv:2504.05118)."""

    type: Literal["positive_nll"] = "positive_nll"
    """Names the loss."""

    weight: float = Field(default=0.1, ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)
    """Factor on this loss in the sum over the head's losses; the paper's value."""

    normalisation: Literal["tokens"] = "tokens"
    """The sum / labels of the step with an advantage above 0, and not / all labels."""

    @model_validator(mode="after")
    def _has_one_count(self) -> "PositiveNLLLossConfig":
        if self.stream is not None:
            raise ValueError(
                f"`stream: {self.stream}` must not be given with `type: positive_nll`, which is"
                " divided by the positive labels of all streams; leave it out"
            )
        return self

    def required_columns(self) -> frozenset[str]:
        """The advantages, whose sign says which labels are positive."""
        return super().required_columns() | {"advantages"}


class DPOLossConfig(LossConfig):
    """Preference between the chosen and the rejected document of each pair (arXiv:2305.18290)."""

    type: Literal["dpo"] = "dpo"
    """Names the loss."""

    beta: float = Field(default=0.1, ge=1e-6, le=HIGHEST_RATIO)
    """Strength of the pull to the reference."""

    variant: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Of the margin m: -log sigmoid(beta m), (m - 1 / (2 beta))^2, or max(0, 1 - beta m)."""

    log_ratio: Literal["sum", "mean"] = "sum"
    """Whether a document's log-ratio to the reference is summed or averaged over its labels."""

    normalisation: Literal["groups"] = "groups"
    """A pair is a group; the mean over pairs."""

    def required_columns(self) -> frozenset[str]:
        """The chosen one of a pair has the advantage above 0."""
        return super().required_columns() | {"advantages", "ref_logprobs", "group_index"}


class DistillationLossConfig(LossConfig):
    """Divergence between the distributions of a teacher and of the policy, over the vocabulary."""

    type: Literal["distillation"] = "distillation"
    """Names the loss."""

    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = "forward_kl"
    """`forward_kl`: KL(teacher, policy). `reverse_kl`: KL(policy, teacher). `jensen_shannon`:
    beta KL(teacher, m) + (1 - beta) KL(policy, m), m = beta teacher + (1 - beta) policy."""

    beta: float | None = Field(default=None, gt=0, lt=1)
    """Weight of the teacher under `divergence: jensen_shannon`, 0.5 there if not given; only
    there."""

    recorded: bool = False
    """The teacher is its recorded entries (`teacher_ids`, `teacher_logprobs` of the documents), and
    all other ids together are one bin of both distributions; otherwise its hidden states and head,
    which the call of the head is given."""

    def required_columns(self) -> frozenset[str]:
        """The entries, where they are recorded."""
        return super().required_columns() | ({"teacher_tokens"} if self.recorded else frozenset())

    @model_validator(mode="after")
    def _recorded_at_one_scale(self) -> "DistillationLossConfig":
        if self.recorded and self.logits_scale != 1:
            raise ValueError(
                "`logits_scale` must be 1 with `recorded`, as the teacher's log-probabilities are"
                f" those of the documents' temperature, got {self.logits_scale}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_beta(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("divergence") == "jensen_shannon":
            return {"beta": 0.5} | values
        return values

    @model_validator(mode="after")
    def _beta_belongs_to_jensen_shannon(self) -> "DistillationLossConfig":
        if (self.beta is not None) != (self.divergence == "jensen_shannon"):
            raise ValueError(
                "`beta` must be given with `divergence: jensen_shannon` and only there, got"
                f" `beta: {self.beta}` with `divergence: {self.divergence}`"
            )
        return self


BuiltInLossConfig = Annotated[
    CrossEntropyLossConfig
    | ZLossConfig
    | SquaredLogRatioLossConfig
    | PositiveNLLLossConfig
    | DPOLossConfig
    | DistillationLossConfig
    | GRPOLossConfig
    | GSPOLossConfig
    | GSPOTokenLossConfig
    | LUSPOLossConfig
    | CISPOLossConfig
    | ClipCovLossConfig
    | KLCovLossConfig
    | SAPOLossConfig
    | GMPOLossConfig
    | VESPOLossConfig
    | DPPOLossConfig
    | ReinforceLossConfig,
    Field(discriminator="type"),
]
"""The losses of the package by their `type`."""

AnyLossConfig = Annotated[
    Annotated[BuiltInLossConfig, Tag("built_in")] | Annotated[UserLossConfig, Tag("imported")],
    Discriminator(loss_tag),
]
"""A loss of the package, or one whose `type` is the import path of its class."""


class KeepSetConfig(Config):
    """The entries of the vocabulary that the sampler drew from, at the temperature.

    Log-probabilities, entropies and ratios are then those of the distribution that was sampled.
    The log-probabilities in the data must be taken over the same set.
    """

    top_k: int | None = Field(default=None, gt=0, le=2**24)
    """The k most probable entries."""

    top_p: float | None = Field(default=None, gt=0, lt=1)
    """The fewest most probable entries, of those that `top_k` left, with this share of their
    probability."""

    min_p: float | None = Field(default=None, gt=0, lt=1)
    """Entries at least so many times as probable as the most probable one."""

    recorded: bool = False
    """The entries that the sampler recorded for each token (`kept_tokens` of the documents),
    instead of a search in the policy's own distribution."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> "KeepSetConfig":
        searched = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.recorded and searched:
            raise ValueError(f"`recorded` must not be given with {searched}, which it replaces")
        if not self.recorded and not searched:
            raise ValueError("`keep` must have `top_k`, `top_p`, `min_p` or `recorded`")
        return self


def _is_smooth(loss: AnyLossConfig) -> bool:
    """Whether a loss has a target for each entry of the vocabulary."""
    return isinstance(loss, CrossEntropyLossConfig) and loss.label_smoothing > 0


class HeadOptions(Config):
    """The head of a model whose sizes are given elsewhere."""

    losses: dict[str, AnyLossConfig] = Field(default_factory=dict)
    """The losses by name; their weighted sum is the head's loss, their names prefix the metrics."""

    bias: bool = False
    """Whether the head adds a bias to its logits."""

    softcap: float | None = Field(default=None, ge=1e-3, le=1e6)
    """Bound of the logits, softcap * tanh(logits / softcap) (Gemma); none by default."""

    logit_scale: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Factor on the logits, before the cap."""

    keep: KeepSetConfig | None = None
    """The sampler's top-k, top-p or min-p set, over which log-probabilities are renormalised; the
    whole vocabulary by default. Needs `strategy` auto or recompute."""

    strategy: Literal["auto", "recompute", "single_pass"] = "auto"
    """`recompute`: logits a second time in the backward, any loss. `single_pass`: loss and
    gradients chunk by chunk, logits once. `auto`: `single_pass` where the loss and
    `max_logits_bytes` permit it, and not in fp16: there the gradient of the logits would be rounded
    before the loss scale is known."""

    drop_inactive_rows: bool = False
    """Whether the backward of `recompute` looks for tokens whose gradient turned out to be 0
    (clipped, filtered) and leaves them out, for which it waits for the device once. Tokens known to
    be inactive beforehand (no label, zero advantage) are left out anyway."""

    deterministic: bool = False
    """Whether the log-probability, entropy and log-sum-exp of a token are, to the bit, a function
    of its hidden state, the weight, its label and its temperature alone: whatever the batch, its
    packing and order, micro-batches, strategy and ranks. Vocabulary-parallel ranks then hold whole
    blocks of 256 rows (`padded_vocab_size`)."""

    chunk_size: int | None = Field(default=None, gt=0)
    """Most rows of logits that may exist at a time; bounded by `max_logits_bytes` alone by
    default."""

    max_logits_bytes: int = Field(default=DEFAULT_MAX_LOGITS_BYTES, gt=0)
    """Most bytes of logits that may exist at a time. `single_pass` in several chunks takes half of
    it, since it also keeps a sum of the weight's gradient in fp32."""

    vocabulary_parallel: bool = True
    """Whether the weight's rows are sharded over the tensor axis; otherwise it is replicated."""

    metrics: bool = True
    """Whether the losses' metrics (ratio, clip fractions, entropy, ...) are computed. Without
    them, tokens of zero advantage do not enter the head at all."""

    @model_validator(mode="after")
    def _dropping_has_an_effect(self) -> "HeadOptions":
        if self.drop_inactive_rows and self.strategy == "single_pass":
            raise ValueError(
                "`drop_inactive_rows` must not be given with `strategy: single_pass`, which forms"
                " the gradient of a token before anything is known of it; use auto or recompute"
            )
        return self

    @model_validator(mode="after")
    def _check_losses(self) -> "HeadOptions":
        self.check_losses(self.losses)
        return self

    def check_losses(self, losses: Mapping[str, AnyLossConfig]) -> None:
        """Refuses losses that mean nothing under this head.

        Raises:
            ValueError: naming the loss and the option.
        """
        if self.deterministic and self.keep is not None:
            raise ValueError(
                "`deterministic` must not be given with `keep`: sums over a keep-set depend on the"
                " other rows of the batch; leave out one of the two"
            )
        for name, loss in losses.items():
            self._check_deterministic(name, loss)
            if self.keep is not None and _is_smooth(loss):
                raise ValueError(
                    f"`keep` must not be given with `label_smoothing` of the loss `{name}`, which"
                    " spreads the target over the whole vocabulary, where the keep-set has"
                    " probability 0"
                )

    def _check_deterministic(self, name: str, loss: AnyLossConfig) -> None:
        if self.deterministic and (_is_smooth(loss) or isinstance(loss, DistillationLossConfig)):
            raise ValueError(
                f"`deterministic` must not be given with the loss `{name}`, whose distillation or"
                " `label_smoothing` takes sums over the vocabulary that depend on the other rows"
                " of the batch; leave out one of the two"
            )


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
