"""Options that losses share: normalisation, KL, rollout correction, masks, entropy."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from fastrl.config.base import Config

Normalisation = Literal["tokens", "documents", "groups", "constant"]

Stream = Literal["rl", "ce", "distill"]
"""Parts of a step's labels with weights and counts of their own."""

RatioLevel = Literal["none", "token", "document", "document_token", "document_product"]
"""Of the ratio of new to old policy; `ratio_of_level` of the losses defines each."""

HIGHEST_RATIO = 1e9
"""Bounds and weights beyond it have no effect: ratios saturate at exp(20)."""


class LossConfig(Config):
    """Options of every loss."""

    if TYPE_CHECKING:
        # Each loss declares it, after the fields that it shares. Of a loss that is no part of the
        # package it is a text, the import path of the loss's class.
        type: str

    weight: float = Field(default=1.0, ge=-HIGHEST_RATIO, le=HIGHEST_RATIO)
    """Factor on this loss in the sum over the head's losses."""

    logits_scale: float = Field(default=1.0, ge=1e-3, le=1e3)
    """This loss sees the logits times this factor, as if its temperature were so many times lower.
    Losses of equal scale share one pass over the logits."""

    normalisation: Normalisation = "tokens"
    """`tokens`: sum / labels in the batch. `documents`: each document's token mean / documents in
    the batch. `groups`: each prompt group's token mean / groups in the batch. `constant`: sum /
    (documents in the batch * `length`), as in Dr. GRPO."""

    length: int | None = Field(default=None, gt=0, le=10**9)
    """Tokens a document counts as under `normalisation: constant`, for example the completion
    limit; only there."""

    stream: Stream | None = None
    """The loss acts on the labels of this stream alone, those whose weight in it (`rl_weight`,
    `ce_weight`, `distill_weight` of the documents) is not 0: each token's loss is multiplied by its
    weight, and divided by the counts of the stream's labels or documents in the batch. All labels
    with weight 1 by default."""

    def required_columns(self) -> frozenset[str]:
        """The optional columns of `BatchKwargs` without which the loss refuses a batch."""
        columns = {"group_label_counts"} if self.normalisation == "groups" else set()
        return frozenset(columns if self.stream is None else columns | {f"{self.stream}_weights"})

    @model_validator(mode="after")
    def _stream_has_no_groups(self) -> "LossConfig":
        if self.stream is not None and self.normalisation == "groups":
            raise ValueError(
                f"`stream: {self.stream}` must not go with `normalisation: groups` of `type:"
                f" {self.type}`, as a stream has no counts of groups; use `tokens`, `documents` or"
                " `constant`"
            )
        return self

    @model_validator(mode="after")
    def _length_belongs_to_constant(self) -> "LossConfig":
        if (self.length is not None) != (self.normalisation == "constant"):
            raise ValueError(
                "`length` must be given with `normalisation: constant` and only there, got"
                f" `length: {self.length}` with `normalisation: {self.normalisation}`"
            )
        return self


class AdaptiveKLConfig(Config):
    """A controller of a KL coefficient that keeps the KL near a target (arXiv:1909.08593).

    After each step over n documents whose mean KL was k:

        coefficient <- coefficient * (1 + clip(k / target - 1, -0.2, 0.2) * min(n / horizon, 1))
    """

    target: float = Field(gt=0, le=HIGHEST_RATIO)
    """Mean KL (nats a token) to stay at."""

    horizon: float = Field(gt=0, le=HIGHEST_RATIO)
    """Documents over which the coefficient can change by a fifth."""


class KLConfig(Config):
    """A penalty on the KL divergence from the frozen reference policy.

    With d = logprob - ref_logprob of a sampled token, the estimators of the token's KL are
    k1 = d, k2 = d^2 / 2 and k3 = exp(-d) - 1 + d. Plain back-propagation through k1 or k3 leaves
    out that the tokens were drawn from the policy: k1 gives 0 on average, k3 the gradient of
    KL(reference, policy).
    """

    coefficient: float = Field(gt=0, le=HIGHEST_RATIO)
    """Factor on the term (beta); the first value under `adaptive`."""

    adaptive: AdaptiveKLConfig | None = None
    """Moves the coefficient after each optimizer step, by the metric `kl_ref` (k3)."""

    clamp: float | None = Field(default=None, gt=0, le=HIGHEST_RATIO)
    """The estimate is clamped to +-`clamp` nats a token, with gradient 0 beyond it."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Which estimator gives the value."""

    gradient: Literal["ratio", "straight_through", "estimator"] = "ratio"
    """`ratio`: the estimator times the ratio new / old, through which the gradient flows as well:
    the gradient of KL(policy, reference), also off-policy. `straight_through`: the value of the
    estimator with the gradient of k2, which is the KL's for tokens of the current policy.
    `estimator`: plain back-propagation, as in the first GRPO (k3: the gradient of the reverse
    KL)."""

    ratio_level: Literal["token", "document", "document_product"] = "token"
    """With `gradient: ratio`, the ratio: of each token; `document`, the geometric mean over the
    document (biased, the choice of TRL for document-level losses); `document_product`, the ratio of
    the whole document (unbiased for the sum over the document, of high variance)."""

    @model_validator(mode="after")
    def _gradients_that_make_sense(self) -> "KLConfig":
        if self.estimator == "k1" and self.gradient == "estimator":
            raise ValueError(
                "`estimator: k1` must not go with `gradient: estimator`, whose mean is 0 whatever"
                " the policy; use `gradient: ratio` or `straight_through`"
            )
        if self.estimator == "k2" and self.gradient == "straight_through":
            raise ValueError(
                "`gradient: straight_through` is the gradient of k2 and has no effect with"
                " `estimator: k2`; use `gradient: estimator`"
            )
        if self.estimator == "k2" and self.gradient == "ratio":
            raise ValueError(
                "`estimator: k2` must not go with `gradient: ratio`: the mean of k2 is not the KL,"
                " so its ratio-weighted gradient is not the KL's; use `gradient: estimator`, or k3"
            )
        if self.clamp is not None and self.gradient == "straight_through":
            raise ValueError(
                "`clamp` has no effect on the gradient with `gradient: straight_through`, which is"
                " that of k2; use `gradient: ratio` or `estimator`"
            )
        if self.ratio_level != "token" and self.gradient != "ratio":
            raise ValueError(
                f"`ratio_level: {self.ratio_level}` has no effect with `gradient: {self.gradient}`;"
                " it belongs to `gradient: ratio`"
            )
        return self


class OnPolicyDistillationConfig(Config):
    """An advantage of each token from a teacher, whose log-probabilities are `ref_logprobs`.

    With d = ref_logprob - logprob, detached: advantage = reward's advantage + coefficient * d. The
    policy gradient of d is that of KL(policy, teacher) for tokens of the current policy.
    """

    coefficient: float = Field(default=1.0, gt=0, le=HIGHEST_RATIO)
    """Factor on d."""

    rewards: bool = True
    """Whether the batch's advantages are added, or are not read."""

    bound: float | None = Field(default=None, gt=0, le=HIGHEST_RATIO)
    """d is clipped to [-`bound`, `bound`] nats; not at all by default."""


class RolloutCorrectionConfig(Config):
    """Importance weights for tokens that a sampler with other numerics or weights drew.

    w = policy / sampler from `rollout_logprobs`, always detached. The policy is the old one, whose
    ratio to the current one is the loss's own, or the current one for `reinforce`, which has no
    ratio. The loss is still divided by the original counts, also where weights are 0.
    """

    level: Literal["token", "document"] = "token"
    """`token`: each token its own weight. `document`: one weight for the whole document."""

    mean: Literal["product", "geometric"] | None = None
    """Only with `level: document`, and needed there: the product of the token ratios (unbiased), or
    their geometric mean."""

    mode: Literal["truncate", "mask"] = "truncate"
    """Weights outside of the bounds are set to the bound (`truncate`), or to 0 (`mask`)."""

    low: float | None = Field(default=None, gt=0, le=HIGHEST_RATIO)
    """Lower bound of the weights; none by default."""

    high: float | None = Field(default=2.0, gt=0, le=HIGHEST_RATIO)
    """Upper bound of the weights; none with null."""

    @model_validator(mode="after")
    def _bounds_and_mean(self) -> "RolloutCorrectionConfig":
        if (self.mean is not None) != (self.level == "document"):
            raise ValueError(
                "`mean` must be given with `level: document` and only there, got"
                f" `mean: {self.mean}` with `level: {self.level}`"
            )
        if self.mode == "mask" and self.low is None and self.high is None:
            raise ValueError("`mode: mask` must have `low` or `high`, or it has no effect")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"`low` must be below `high`, {self.high}, got {self.low}")
        return self


class ProximalConfig(Config):
    """A stand-in for the log-probabilities of the policy that ratios are taken to.

    prox = mu + a (sg(logp) - mu) lies between the sampler's mu and the policy itself, so that a
    decoupled PPO needs no pass over the batch before its update (A-3PO, arXiv:2512.06547).
    """

    type: Literal["log_linear"] = "log_linear"
    """How it lies between: linear in log-probabilities."""

    weight: float | None = Field(default=None, ge=0, lt=1)
    """a, from the sampler (0) towards the policy (1). Default: (s - 1) / s of each document, s the
    versions from its `model_version` to the batch's `current_version`; 0 where s is 0."""


class OffPolicyMaskConfig(Config):
    """A mask on tokens of negative advantage in documents that the policy has drifted away from.

    A token is dropped when its advantage is below 0 and the mean over its document of
    behaviour_logprob - logprob exceeds the threshold. The denominator stays the original count.
    """

    threshold: float = Field(gt=0, le=HIGHEST_RATIO)
    """Largest mean log-ratio (nats a token) that is kept."""

    behaviour: Literal["old", "rollout"] = "old"
    """Whose log-probabilities: `old_logprobs`, or the sampler's `rollout_logprobs`."""


class AdaptiveEntropyConfig(Config):
    """A controller of the entropy bonus that keeps the entropy near a target.

    After each optimizer step the bonus rises by `step` when the step's mean entropy was at most
    `target`, and falls by `step` otherwise, within [`low`, `high`]. It is applied in the next step
    only if the last entropy was at most the target.
    """

    target: float = Field(gt=0, le=HIGHEST_RATIO)
    """Mean entropy (nats a token) to stay at."""

    step: float = Field(default=0.005, gt=0, le=HIGHEST_RATIO)
    """Change of the bonus per optimizer step."""

    low: float = Field(default=0.0, ge=0, le=HIGHEST_RATIO)
    """Smallest bonus."""

    high: float = Field(default=1.0, gt=0, le=HIGHEST_RATIO)
    """Largest bonus."""

    @model_validator(mode="after")
    def _bounds(self) -> "AdaptiveEntropyConfig":
        if self.low >= self.high:
            raise ValueError(f"`low` must be below `high`, {self.high}, got {self.low}")
        return self


class EntropyConfig(Config):
    """Terms of the loss that depend on the entropy of the policy."""

    bonus: float = Field(default=0.0, ge=0, le=HIGHEST_RATIO)
    """Factor on the mean entropy of the batch's labels, which is subtracted from the loss; the
    first value under `adaptive`."""

    adaptive: AdaptiveEntropyConfig | None = None
    """Moves the bonus towards a target entropy."""

    top_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Only so many of the tokens, those of highest entropy among all ranks' tokens of the
    micro-batch, enter the policy loss and the bonus. The denominator stays the original count."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> "EntropyConfig":
        if not self.bonus and self.adaptive is None and self.top_fraction is None:
            raise ValueError(
                "`entropy` must have `bonus`, `adaptive` or `top_fraction`, or it has no effect"
            )
        bounds = self.adaptive
        if bounds is not None and not bounds.low <= self.bonus <= bounds.high:
            raise ValueError(
                f"`bonus` must be within `adaptive.low` and `adaptive.high`, {bounds.low} to"
                f" {bounds.high}, got {self.bonus}"
            )
        return self
