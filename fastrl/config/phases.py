"""Configs of the phases of a run: steps, losses, optimizer."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fastrl.config.advantages import AdvantageConfig
from fastrl.config.base import Config, PathText
from fastrl.config.losses import AnyLossConfig
from fastrl.config.rollouts import RolloutsConfig, SamplerRolloutsConfig


class OptimizerConfig(Config):
    """AdamW with a learning-rate schedule; every phase starts a new one."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate after the warm-up."""

    warmup_updates: int = Field(default=0, ge=0, le=10**6)
    """Updates over which the learning rate rises linearly: update i of n takes i / n of it."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up, over the updates of the phase."""

    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the learning rate that `linear` and `cosine` end at."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """Decay of the means of the gradient and of its square."""

    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the mean square."""

    weight_decay: float = Field(default=0.0, ge=0, le=1000)
    """Decoupled decay of the weight matrices; norms and biases have none."""

    max_grad_norm: float | None = Field(default=1.0, ge=1e-6)
    """Gradients are scaled down to this norm over all parameters; null: never."""

    max_skipped_updates: int = Field(default=10, ge=0, le=10**6)
    """Updates with gradients that are not finite are left out; more of them than this, one after
    another, end the run. 0: the first one does."""


class PhaseConfig(Config):
    """Options of every phase of a run."""

    name: str | None = None
    """Name in the display and in file names. Default: the phase's type."""

    steps: int = Field(gt=0, le=10**9)
    """Number of steps."""

    losses: dict[str, AnyLossConfig] | None = None
    """The losses by name. Default: `model.head.losses`."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer of this phase."""

    max_tokens_per_micro_batch: int = Field(default=8192, gt=0)
    """Most tokens of a forward and backward pass. The gradients of an update are summed over its
    micro-batches and do not depend on this number. No document may be longer."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(
                "must begin with a letter, a digit or `_` and go on with these, `.` and `-`, as "
                f"folders are named after it; got {name!r}"
            )
        return name


class SupervisedPhaseConfig(PhaseConfig):
    """Training on the answers that the environment gives for its training prompts."""

    type: Literal["supervised"] = "supervised"
    """Names the kind of phase."""

    documents_per_step: int = Field(default=128, gt=0, le=10**7)
    """Prompts with their answers, for one update a step."""


class TokenSamplingConfig(Config):
    """A random part of the labels, weighted so that the gradient keeps its mean.

    Each label is drawn with `probability` p and weighs 1 / p; counts stay those of all labels. The
    head does not compute the others (arXiv:2603.06619). Draws are new in each step, the same in its
    epochs, and do not depend on packing or processes.
    """

    probability: float = Field(gt=0, lt=1)
    """Of each label."""


class ReferenceConfig(Config):
    """A frozen model that is the reference policy, a teacher for one."""

    path: PathText
    """Folder of its config and weights in Hugging Face's format, relative to the current folder. Of
    any size, and of the vocabulary of the model. It must stay as it is while the run goes on."""


class RLPhaseConfig(PhaseConfig):
    """Training on rewards. A step takes rollouts and makes `epochs` * `mini_batches` updates."""

    type: Literal["rl"] = "rl"
    """Names the kind of phase."""

    rollouts: RolloutsConfig = SamplerRolloutsConfig()
    """Where completions come from."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""

    reference: ReferenceConfig | None = None
    """The reference policy of `kl` and the teacher of `on_policy_distillation`, for sampled
    rollouts. Default: the model as it is when the phase begins."""

    mini_batches: int = Field(default=1, gt=0, le=10**6)
    """Parts that a step's rollouts are split into, one update each. After the first update the
    model differs from the one that sampled, and the ratio from 1."""

    epochs: int = Field(default=1, gt=0, le=10**6)
    """Number of passes over a step's rollouts."""

    token_sampling: TokenSamplingConfig | None = None
    """Learns from a random part of the labels of each step, with losses that are sums over single
    tokens."""

    share_prefixes: bool = False
    """Whether the completions of one prompt share its tokens in a micro-batch instead of repeating
    them; they then stay in one micro-batch where they fit. No number changes. With `sequence_data:
    1` and `micro_sequences: 1` of `parallel` only."""

    @model_validator(mode="after")
    def _has_what_advantages_need(self) -> Self:
        advantage, rollouts = self.advantage, self.rollouts
        if rollouts.type == "files":
            if advantage.aggregation == "normalise_then_sum" and len(rollouts.reward_columns) < 2:
                raise ValueError(
                    "`advantage.aggregation: normalise_then_sum` must go with at least two"
                    f" `rollouts.reward_columns`, got {list(rollouts.reward_columns)}"
                )
            return self
        if advantage.aggregation == "normalise_then_sum":
            raise ValueError(
                "`advantage.aggregation: normalise_then_sum` must go with `rollouts` of type"
                " `files` and their `reward_columns`, as an environment gives one reward"
            )
        if rollouts.type == "server" and advantage.baseline in ("greedy", "optimal_token"):
            raise ValueError(
                f"`advantage.baseline: {advantage.baseline}` must not go with `rollouts` of type"
                " `server`, which are not asked for what it needs; use the type `sampler`"
            )
        if rollouts.group_size == 1 and advantage.baseline not in ("greedy", "none"):
            raise ValueError(
                "`rollouts.group_size` must be at least 2 with `advantage.baseline:"
                f" {advantage.baseline}`, got 1: there is nothing to compare a completion with"
            )
        if rollouts.group_size < advantage.pass_at:
            raise ValueError(
                f"`advantage.pass_at` must be at most `rollouts.group_size`, {rollouts.group_size},"
                f" got {advantage.pass_at}"
            )
        return self


AnyPhaseConfig = Annotated[SupervisedPhaseConfig | RLPhaseConfig, Field(discriminator="type")]
