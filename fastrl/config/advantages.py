"""Configs of what is done to rewards until they are advantages."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fastrl.config.base import Config
from fastrl.config.loss_options import HIGHEST_RATIO, AdaptiveKLConfig


class OverlongShapingConfig(Config):
    """DAPO's soft punishment of overlong completions; arXiv:2503.14476, equation 13.

    To the reward of a completion of |y| tokens, its end token included, is added

         0                                                   |y| <= max_length - cache_length
         (max_length - cache_length - |y|) / cache_length           up to max_length
        -1                                                          beyond it
    """

    type: Literal["overlong"] = "overlong"
    """Names the kind of shaping."""

    max_length: int | None = Field(default=None, gt=0)
    """L_max. Default: `sampler.max_new_tokens`; rollouts of type `files` must be given it."""

    cache_length: int | None = Field(default=None, gt=0)
    """L_cache, the length over which the punishment grows. Default: a fifth of `max_length`, as in
    the paper (4096 of 20480), and at least 1."""

    def resolved(self, max_new_tokens: int | None) -> tuple[int, int]:
        """`max_length` and `cache_length` for a sampler of so long completions; None for files."""
        max_length = max_new_tokens if self.max_length is None else self.max_length
        if max_length is None:
            raise ValueError("`max_length` is required with `rollouts` of type `files`")
        cache_length = max(1, max_length // 5) if self.cache_length is None else self.cache_length
        if cache_length > max_length:
            raise ValueError(
                f"`cache_length` must be at most `max_length` ({max_length}), got {cache_length}"
            )
        if max_new_tokens is not None and max_length - cache_length >= max_new_tokens:
            raise ValueError(
                f"`max_length` - `cache_length` ({max_length} - {cache_length}) must be below "
                f"`sampler.max_new_tokens` ({max_new_tokens}), or no completion is punished"
            )
        return max_length, cache_length


class KLInRewardConfig(Config):
    """A part of the reward that pays for the divergence from the reference policy.

        R' = R - coefficient * sum_t k_t   over the tokens of the completion

    k is the estimate of each token's KL from the sampler's log-probability, `logprobs`, and that of
    the reference: a copy of the model at the start of the phase, or `ref_logprobs` of the files.
    """

    coefficient: float = Field(gt=0, le=HIGHEST_RATIO)
    """beta; the first value under `adaptive`."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of k, as in `kl` of the losses; k1 has the KL's gradient."""

    level: Literal["document", "token"] = "document"
    """`document`: of the reward, before the baseline. `token`: the advantage of token t is less by
    coefficient * sum_{s >= t} k_s, after the baseline, as in REINFORCE++."""

    clamp: float | None = Field(default=None, gt=0, le=HIGHEST_RATIO)
    """k is clamped to +-`clamp` nats."""

    adaptive: AdaptiveKLConfig | None = None
    """Moves the coefficient after each step, by the mean of k."""


Bounds = tuple[
    Annotated[float, Field(ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)],
    Annotated[float, Field(ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)],
]


class AdvantageConfig(Config):
    """From rewards to advantages, among the completions of one prompt.

    Documents of rollout files that carry advantages of their own keep them.
    """

    PRESETS: ClassVar[dict[str, dict[str, str]]] = {
        "grpo": {},
        "dr_grpo": {"scale": "none"},
        "rloo": {"baseline": "leave_one_out", "scale": "none"},
        "reinforce_plus_plus": {"baseline": "none", "scale": "none", "whiten": "tokens"},
        "reinforce_plus_plus_baseline": {"scale": "none", "whiten": "tokens"},
        "maxrl": {"scale": "mean"},
        "gdpo": {"aggregation": "normalise_then_sum", "whiten": "rollouts"},
        "opo": {"baseline": "length_weighted", "scale": "none"},
        "remax": {"baseline": "greedy", "scale": "none"},
        "optimal_token": {"baseline": "optimal_token", "scale": "none"},
    }

    preset: (
        Literal[
            "grpo",
            "dr_grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "maxrl",
            "gdpo",
            "opo",
            "remax",
            "optimal_token",
        ]
        | None
    ) = None
    """Gives the fields below their values of a paper; fields that are set go first. The table of
    docs/data.md has them."""

    baseline: Literal[
        "mean", "leave_one_out", "length_weighted", "greedy", "optimal_token", "none"
    ] = "mean"
    """What is subtracted from a reward: the group's mean, that of its other members, its mean
    weighted by lengths, the reward of the most likely answer, the baseline of least variance at
    each token, or nothing."""

    scale: Literal["none", "group", "batch", "mean"] = "group"
    """Divisor: the standard deviation of the group's rewards, of the step's, the mean of the
    group's rewards, or none."""

    pass_at: int = Field(default=1, ge=1, le=10**4)
    """The reward of a completion is that of the best of so many, over all sets of the group that it
    is in."""

    aggregation: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """Of several rewards (`reward_columns`): their sum gets an advantage, or each of them gets one,
    and these are summed with the weights of the columns."""

    whiten: Literal["none", "tokens", "rollouts"] = "none"
    """Whether the step's advantages, each token's or each completion's, are brought to mean 0 and
    variance 1."""

    clamp: Bounds | None = None
    """Bounds of the advantages, the last thing that is done to them."""

    reward_clamp: Bounds | None = None
    """Bounds of the rewards, before anything is added to them."""

    kl_in_reward: KLInRewardConfig | None = None
    """What rewards pay for the divergence from the reference policy. The metric `reward` is without
    it."""

    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups of equal rewards teach nothing. `keep` counts their tokens in what the loss is divided
    by, `drop` leaves them out of the step."""

    shaping: OverlongShapingConfig | None = None
    """What is added to rewards before advantages are taken. The metric `reward` is without it."""

    truncated: Literal["keep", "drop"] = "keep"
    """Sampled completions that had not ended. `drop` leaves them out of the loss (DAPO's overlong
    filtering); their rewards still count in the advantages of their group."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("preset"), str):
            return cls.PRESETS.get(values["preset"], {}) | values
        return values

    @model_validator(mode="after")
    def _options_that_go_together(self) -> Self:
        if self.scale == "mean":
            self._needs("scale: mean", "baseline", "mean")
        if self.baseline == "optimal_token":
            self._needs("baseline: optimal_token", "scale", "none")
        if self.pass_at > 1:
            self._needs("pass_at", "baseline", "mean", "leave_one_out")
            scales = ("none", "group") if self.baseline == "mean" else ("none",)
            self._needs("pass_at", "scale", *scales)
        if self.aggregation == "normalise_then_sum":
            # Each reward is compared by itself, so nothing acts on their sum.
            name = "aggregation: normalise_then_sum"
            self._needs(name, "baseline", "mean", "leave_one_out")
            self._needs(name, "scale", "group", "batch", "mean")
            self._needs(name, "pass_at", 1)
            for other in ("shaping", "reward_clamp", "kl_in_reward"):
                self._needs(name, other, None)
        if self.kl_in_reward is not None and self.kl_in_reward.level == "token":
            # The divergence is subtracted after the baseline, which neither scales nor knows it.
            self._needs("kl_in_reward.level: token", "scale", "none")
            if self.baseline == "optimal_token":
                self._needs("kl_in_reward.level: token", "baseline", "mean", "none")
        if self.whiten != "none":  # no advantage stays 0
            self._needs(f"whiten: {self.whiten}", "zero_variance", "keep")
        if self.has_token_advantages:
            by_baseline = self.baseline == "optimal_token"
            name = "baseline: optimal_token" if by_baseline else "kl_in_reward.level: token"
            self._needs(name, "whiten", "none", "tokens")
        return self

    def _needs(self, name: str, other: str, *allowed: object) -> None:
        """Refuses another value of a field than those that `name` goes with."""
        if (value := getattr(self, other)) not in allowed:
            values = " or ".join("null" if one is None else str(one) for one in allowed)
            got = "one" if isinstance(value, Config | tuple) else value
            raise ValueError(f"`{name}` must go with `{other}` of {values}, got {got}")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for name in ("clamp", "reward_clamp"):
            bounds = getattr(self, name)
            if bounds is not None and bounds[0] >= bounds[1]:
                raise ValueError(
                    f"`{name}` must be [low, high] with low below high, got {list(bounds)}"
                )
        if self.clamp is not None and not self.clamp[0] <= 0 <= self.clamp[1]:
            raise ValueError(f"`clamp` must have 0 within its bounds, got {list(self.clamp)}")
        return self

    @property
    def has_token_advantages(self) -> bool:
        """Whether the advantages of a document's tokens differ."""
        kl = self.kl_in_reward
        return self.baseline == "optimal_token" or (kl is not None and kl.level == "token")
