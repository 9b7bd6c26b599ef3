"""Corrections of a policy-gradient loss: weights and masks by the ratio of two policies."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal

from pydantic import Field, model_validator

from fastrl.config.base import Config
from fastrl.config.loss_options import HIGHEST_RATIO, OffPolicyMaskConfig, RolloutCorrectionConfig


class CorrectionConfig(Config):
    """One detached factor on tokens, by how far `policy` is from `behaviour`.

    With l = log policy - log behaviour of a token, w = exp(l). Whatever a factor is, the loss is
    still divided by the original counts.
    """

    policy: Literal["old", "current"] = "old"
    """Whose tokens are wanted: `old_logprobs`, or the policy that is trained, detached."""

    behaviour: Literal["rollout", "old"] = "rollout"
    """Whose tokens they are: the sampler's `rollout_logprobs`, or `old_logprobs`."""

    mode: Literal["truncate", "mask", "gate"] = "gate"
    """`truncate`: w, held between the bounds. `mask`: w within the bounds, 0 outside. `gate`: 1
    where the statistic is within the bounds, 0 outside."""

    level: Literal["token", "document", "batch"] = "token"
    """`token`: each token by itself. `document`: one factor for the whole document. `batch`: tokens
    are dropped, those of the largest statistic first, until the mean over what is kept of the
    micro-batch, on all ranks, is at most `high`."""

    aggregate: Literal["mean", "sum", "any"] | None = None
    """Only with `level: document`, and needed there: the mean or the sum of the tokens' statistic
    (of l for `ratio`: the geometric mean or the product), or `any`: drops a document with any token
    outside of the bounds."""

    statistic: Literal["ratio", "k1", "k2", "k3", "probability_difference"] = "ratio"
    """What is held to the bounds: w; `k1` = -l, `k2` = l^2 / 2, `k3` = w - 1 - l, the estimators of
    KL(behaviour, policy); or |exp(log policy) - exp(log behaviour)|. Other than `ratio` only with
    `mode: gate`."""

    low: float | None = Field(default=None, ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)
    """Lower bound, of `ratio` and `k1` alone; none by default."""

    high: float | None = Field(default=None, ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)
    """Upper bound; none by default."""

    advantage: Literal["any", "negative", "positive"] = "any"
    """The sign of the advantages of the tokens that it acts on; the factor of others is 1."""

    @property
    def is_weight(self) -> bool:
        """Whether it multiplies by the ratio, instead of keeping or dropping tokens."""
        return self.mode != "gate"

    @property
    def policies(self) -> frozenset[str]:
        """The policies that it compares."""
        return frozenset({self.policy, self.behaviour})

    @model_validator(mode="after")
    def _policies_differ(self) -> "CorrectionConfig":
        if self.policy == self.behaviour:
            raise ValueError(
                "`policy: old` must not go with `behaviour: old`, from which it does not differ;"
                " use `policy: current` or `behaviour: rollout`"
            )
        return self

    @model_validator(mode="after")
    def _level_and_aggregate(self) -> "CorrectionConfig":
        if (self.aggregate is not None) != (self.level == "document"):
            raise ValueError(
                "`aggregate` must be given with `level: document` and only there, got"
                f" `aggregate: {self.aggregate}` with `level: {self.level}`"
            )
        if self.is_weight and (self.statistic != "ratio" or self.level == "batch"):
            raise ValueError(
                f"`mode: {self.mode}` must go with `statistic: ratio` and `level: token` or"
                f" `document`, whose ratio is the weight, got `statistic: {self.statistic}` and"
                f" `level: {self.level}`; use `mode: gate`"
            )
        if self.is_weight and self.aggregate == "any":
            raise ValueError(
                f"`mode: {self.mode}` must not go with `aggregate: any`, which is no weight of a"
                " document; use `mode: gate` for it, beside a weight of its own entry"
            )
        if self.level == "batch" and self.statistic in ("ratio", "k1"):
            raise ValueError(
                f"`level: batch` must not go with `statistic: {self.statistic}`, which is largest"
                " on one side alone; use `k2` (M2PO: `high` half its bound), `k3` or"
                " `probability_difference`"
            )
        if self.level == "batch" and self.advantage != "any":
            raise ValueError(
                f"`level: batch` must not go with `advantage: {self.advantage}`: the mean of what"
                " is kept would not be held to `high`; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _bounds_can_act(self) -> "CorrectionConfig":
        if self.mode != "truncate" and self.low is None and self.high is None:
            raise ValueError(f"`mode: {self.mode}` must have `low` or `high`, or it has no effect")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"`low` must be below `high`, {self.high}, got {self.low}")
        if self.statistic not in ("ratio", "k1") and self.low is not None:
            raise ValueError(
                f"`low` must not be given with `statistic: {self.statistic}`, which is 0 where the"
                f" policies agree; leave it out, got {self.low}"
            )
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and self.statistic != "k1" and bound <= 0:
                raise ValueError(
                    f"`{name}` must be above 0, as `statistic: {self.statistic}` is, got {bound}"
                )
        is_difference = self.statistic == "probability_difference" and self.aggregate != "sum"
        if is_difference and self.high is not None and self.high >= 1:
            raise ValueError(
                "`high` must be below 1, as a difference of probabilities is, or it has no effect,"
                f" got {self.high}"
            )
        return self


def check_correction(
    entry: CorrectionConfig, option: str, has_ratio: bool, on_policy: bool, loss: str
) -> None:
    """Refuses an entry that means nothing in a loss.

    Args:
        entry: of the loss's `corrections`.
        option: its name.
        has_ratio: whether the loss has a ratio to the old policy.
        on_policy: whether the old policy is the current one.
        loss: type of the loss.

    Raises:
        ValueError: naming the option.
    """
    if not has_ratio and "old" in entry.policies:
        raise ValueError(
            f"`{option}` must compare `policy: current` with `behaviour: rollout` with"
            f" `type: {loss}`, which does not use `old_logprobs`, got `policy: {entry.policy}`"
            f" and `behaviour: {entry.behaviour}`"
        )
    if on_policy and entry.policies == {"current", "old"}:
        raise ValueError(
            f"`{option}`: `behaviour: old` has no effect with `on_policy`, as a policy has not"
            " drifted from itself; use `behaviour: rollout`"
        )
    if has_ratio and entry.is_weight and entry.policy == "current":
        raise ValueError(
            f"`{option}.mode: {entry.mode}` must not go with `policy: current` with `type: {loss}`,"
            " whose ratio current / old would count twice; use `policy: old`, or `mode: gate`"
        )


def check_together(corrections: Mapping[str, CorrectionConfig]) -> None:
    """Refuses corrections that say the same twice.

    Raises:
        ValueError: naming the options.
    """
    for (name, entry), (other, second) in combinations(corrections.items(), 2):
        if entry == second:
            raise ValueError(
                f"`{other}` must differ from `{name}`, which is the same; leave it out"
            )
        apart = {entry.advantage, second.advantage} == {"negative", "positive"}
        if entry.is_weight and second.is_weight and not apart:
            raise ValueError(
                f"`{other}` must not be a second weight (`mode: {second.mode}`) beside `{name}`"
                " where they act on the same tokens: the ratio would count twice; use `mode: gate`,"
                " or `advantage: negative` and `positive`"
            )


def expanded(
    rollout: RolloutCorrectionConfig | None,
    off_policy: OffPolicyMaskConfig | None,
    corrections: Sequence[CorrectionConfig],
    *,
    has_ratio: bool,
) -> dict[str, CorrectionConfig]:
    """All corrections of a loss by the option that each comes from.

    The ratio of a loss is current / old, so that a weight old / sampler makes it current / sampler;
    a loss without ratio takes the weight current / sampler.
    """
    found: dict[str, CorrectionConfig] = {}
    if rollout is not None:
        aggregate: Literal["sum", "mean"] = "sum" if rollout.mean == "product" else "mean"
        found["rollout_correction"] = CorrectionConfig(
            policy="old" if has_ratio else "current",
            mode=rollout.mode,
            level=rollout.level,
            aggregate=None if rollout.mean is None else aggregate,
            low=rollout.low,
            high=rollout.high,
        )
    if off_policy is not None:
        found["off_policy_mask"] = CorrectionConfig(
            policy="current",
            behaviour=off_policy.behaviour,
            level="document",
            aggregate="mean",
            statistic="k1",
            high=off_policy.threshold,
            advantage="negative",
        )
    found.update({f"corrections.{number}": entry for number, entry in enumerate(corrections)})
    return found
